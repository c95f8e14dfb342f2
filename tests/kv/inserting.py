"""Cached pages without the request that has computed them."""

from engine.kv.node import SHARED, Namespace, Published
from engine.kv.pages import Pages
from engine.kv.radix import RadixTree


def insert(tree: RadixTree, key: bytes, pages: Pages, namespace: Namespace = SHARED) -> Published:
    """Publish as a request that has found nothing and ends at once."""
    handle = tree.lock(tree.match(b"", namespace))
    published = tree.publish(handle, key, pages)
    tree.unlock(handle)
    return published
