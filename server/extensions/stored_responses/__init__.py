NEEDS = ("responses", "storage")
