NEEDS = ("storage",)
