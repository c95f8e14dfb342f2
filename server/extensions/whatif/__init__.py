NEEDS = ("bench",)
