"""Layerwise loads from host memory during a step: each layer is awaited, and no earlier than needed."""

import threading
from functools import partial

import pytest
import torch

from tests.fakes.kv import kv_pool
from workers.memory.layerwise_load import LayerwiseLoad


@pytest.mark.parametrize("reads", ["layer_view", "read_pages"])
def test_a_layer_is_read_once_loaded_and_the_load_ends_with_the_last(reads: str) -> None:
    pool, load = kv_pool(3, 1, 3, 4, 1, torch.float32), LayerwiseLoad()
    done: list[int] = []
    grown = threading.Condition()

    def note(number: int) -> None:
        with grown:
            done.append(number)
            grown.notify_all()

    def num_done_is(number: int) -> bool:
        return len(done) == number

    def compute() -> None:
        with pool.in_step(load):
            for layer in range(2):
                if reads == "layer_view":
                    pool.layer_view(layer)
                else:
                    pool.read_pages(layer, torch.tensor([1]), torch.empty(4, 1, 2))
                note(layer)
        note(2)
        pool.layer_view(0)

    thread = threading.Thread(target=compute)
    thread.start()
    for layer in range(3):
        with grown:
            assert grown.wait_for(partial(num_done_is, layer), 60)
        thread.join(0.05)
        assert done == list(range(layer)), "it did not wait"
        load.add(1, None)
    thread.join()
    assert done == [0, 1, 2]


def test_a_copy_that_failed_ends_the_step_with_its_error() -> None:
    pool, load = kv_pool(3, 1, 2, 4, 1, torch.float32), LayerwiseLoad()
    load.add(1, None)
    load.fail(OSError("the memory is gone"))
    with pytest.raises(OSError, match="the memory is gone"), pool.in_step(load):
        pool.layer_view(1)
    pool.layer_view(1)
