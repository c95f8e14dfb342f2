"""States of recurrent layers in the prefix cache."""
