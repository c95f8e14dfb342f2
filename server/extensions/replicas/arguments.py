"""The arguments of ``callboard serve`` for replicas."""

import argparse

from server.arguments import count


def add_serve_arguments(serve: argparse.ArgumentParser) -> None:
    """Add them."""
    serve.add_argument("--replicas", type=count, metavar="N", help="serve N engines behind one router")
    on = "what runs the replicas: Ray, on all machines of its cluster (default: ray)"
    serve.add_argument("--on", choices=["ray"], help=on)
    fleet = "name of replicas that outlive this router: others with the same one send requests to them too"
    serve.add_argument("--fleet", metavar="NAME", help=fleet)
    share = "with --fleet: other routers of it may listen on the same port, such as one for each core"
    serve.add_argument("--share-port", action="store_true", help=share)
    own = "with --share-port: a port where this router alone answers too, such as /metrics for Prometheus"
    serve.add_argument("--own-port", type=count, metavar="PORT", help=own)
