"""Optional parts of the server, a folder each: ``server.run.extension`` finds them by looking."""
