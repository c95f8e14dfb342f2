"""Several models in one server: a front that loads and unloads them, each in a process of its own."""
