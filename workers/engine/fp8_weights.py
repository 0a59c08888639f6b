"""Choice of the matrices that stay in FP8, on devices that multiply in FP8."""

from collections import defaultdict
from collections.abc import Mapping

from workers.models.decoder import DecoderModel
from workers.quant.fp8_matrix import Fp8Matrix
from workers.quant.interface import StoredWeight


def keep_fp8(model: DecoderModel, stored: Mapping[str, StoredWeight]) -> None:
    """Replace parameters by empty matrices in FP8 on the model's device if the checkpoint stores all parts in FP8.

    A parameter stays if this rank's inputs meet blocks in pieces that are too narrow for products in FP8.
    """
    for layer, shards in model.weights_by_layer():
        widths: defaultdict[str, set[int | None]] = defaultdict(set)
        for name, shard in shards.items():
            if shard.matrix is not None:
                _, inputs = shard.shards
                widths[shard.matrix].add(stored[name].fp8_width(inputs.start, inputs.size))
        for matrix, (width, *others) in widths.items():
            if width is not None and not others:
                shape = getattr(layer, matrix).shape
                delattr(layer, matrix)
                setattr(layer, matrix, Fp8Matrix.empty(shape, width, model.device.torch_device))
