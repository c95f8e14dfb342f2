"""The load of the engine in the form that routers read."""
