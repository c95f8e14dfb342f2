"""Pictures of requests: they are fetched, checked and decoded once before the engine gets them."""

NEEDS = ("storage",)
