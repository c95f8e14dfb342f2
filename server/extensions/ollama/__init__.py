NEEDS = ("pooling",)
