"""The slots of recurrent states: what a layer sees of them."""

import torch

from engine.layers.states import RecurrentStates

LAYERS = [[(2, 3)], [(4,), (2, 2, 2)]]


def new_states(num_slots: int = 5) -> RecurrentStates:
    return RecurrentStates(LAYERS, num_slots, torch.device("cpu"))


def test_a_layers_states_are_views_of_one_block_per_slot() -> None:
    states = new_states()
    assert states.num_slots == 5
    assert states.data.shape == (5, 3 * 16)
    assert all(one.data_ptr() % 64 == 0 for layer in states.layers for one in layer)
    assert [[tuple(one.shape[1:]) for one in layer] for layer in states.layers] == LAYERS
    states.layers[1][1][3].fill_(7.0)
    assert states.data[3].tolist() == [0.0] * 32 + [7.0] * 8 + [0.0] * 8
    assert not states.data[:3].any()
