"""Overrides of a deploy file from the command line: `--set key=value` and `--model`."""

from collections.abc import Sequence

from cluster.spec.errors import UserError


def overrides(changes: Sequence[str], model: str | None) -> dict[str, str]:
    """Return dotted keys and their texts, for ``load_config``.

    Raises:
        UserError: a change is not ``key=value``.
    """
    made = {} if model is None else {"model.path": model}
    for change in changes:
        key, equals, value = change.partition("=")
        if not (key and equals):
            raise UserError(f"--set: got {change!r}; allowed: key=value with a dotted key, like kv.page_size=32")
        made[key.strip()] = value.strip()
    return made
