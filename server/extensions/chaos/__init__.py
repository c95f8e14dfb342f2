NEEDS = ("journal", "replicas")
