"""Several engines behind one address: a router that keeps prefixes together, and Ray, which runs the engines."""
