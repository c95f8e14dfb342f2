NEEDS = ("replicas",)
