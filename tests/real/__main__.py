"""The command ``python -m tests.real``: fetch the real model and the published tokenizers, and print where they are."""

from tests.real import model, vocabularies

if __name__ == "__main__":
    reason = model.fetch()
    print(f"real: the model cannot be fetched here: {reason}; its tests are skipped" if reason else model.path())
    for name in vocabularies.SHA512:
        if reason := vocabularies.fetch(name):
            print(f"real: no tokenizer {name}: {reason}; tests are skipped, and no other tokenizer is fetched")
            break
        print(vocabularies.path(name))
