"""The command ``python -m tests.real``: fetch the real model, and print its path."""

from tests.real import model

if __name__ == "__main__":
    reason = model.fetch()
    print(f"real: the model cannot be fetched here: {reason}; its tests are skipped" if reason else model.path())
