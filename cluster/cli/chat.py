"""`baton chat`: a conversation with a running endpoint in the terminal."""

import contextlib
import sys
import time
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

import httpx
import typer

from cluster.bench.endpoint import (
    ENDPOINT_ERRORS,
    FORM_ERRORS,
    checked,
    first_model,
    key_headers,
    parse_line,
    wrong_event,
)
from cluster.cli.commands import Cluster
from cluster.cli.running import endpoint_url

Url = Annotated[
    str | None,
    typer.Option(help="Base URL of the endpoint. Default: the running cluster, or port 8000.", show_default=False),
]

_DIM = "\x1b[2m{}\x1b[0m"
"""Text in a terminal's dim color."""
_HELP = "Ctrl-C stops an answer, Ctrl-D exits, /clear starts a new conversation, /help shows this."


def chat(
    message: Annotated[str | None, typer.Option("--message", "-m", help="Send one message and exit.")] = None,
    url: Url = None,
    cluster: Cluster = None,
    model: Annotated[str | None, typer.Option(help="Model name. Default: the endpoint's first model.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Maximum number of output tokens.", min=1)] = 512,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0 is greedy.", min=0)] = 0.0,
) -> None:
    """Chat with a running endpoint."""
    url = endpoint_url(url, cluster)
    try:
        timeout = httpx.Timeout(600.0, connect=10.0)
        with httpx.Client(base_url=url, timeout=timeout, headers=key_headers()) as client:
            name = model or first_model(client)
            conversation = Conversation(client, name, max_tokens, temperature)
            if message is not None:
                _print_answer(conversation, message)
            else:
                print(f"{name} at {url}. {_HELP}")
                _loop(conversation)
    except ENDPOINT_ERRORS as error:
        print(f"baton chat: {url}: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


class Piece(NamedTuple):
    text: str
    is_reasoning: bool


@dataclass(slots=True)
class Conversation:
    client: httpx.Client
    model: str
    max_tokens: int
    temperature: float
    messages: list[dict[str, str]] = field(default_factory=list)
    speed: str = ""
    """Number of tokens of the last answer, time to its first text, and rate of the rest."""

    def ask(self, text: str) -> Generator[Piece, None, None]:
        """Yield the answer in pieces as they arrive. The conversation keeps interrupted answers, but no failed ones and
        no reasoning.

        Raises:
            EndpointError: the endpoint responded with an error.
            httpx.HTTPError: the connection failed.
            ValueError: the endpoint's host is no name, or an event is not an object.
        """
        question = {"role": "user", "content": text}
        answer = {"role": "assistant", "content": ""}
        self.messages += [question, answer]
        try:
            for piece in self._stream(self.messages[:-1]):
                answer["content"] += "" if piece.is_reasoning else piece.text
                yield piece
        except ENDPOINT_ERRORS:
            del self.messages[-2:]
            raise

    def _stream(self, messages: list[dict[str, str]]) -> Generator[Piece, None, None]:
        body = {
            "model": self.model,
            "messages": messages,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        sent_s, first_s, num_tokens = time.monotonic(), None, 0
        with self.client.stream("POST", "/v1/chat/completions", json=body) as response:
            checked(response)
            for line in response.iter_lines():
                event = parse_line(line) or {}
                try:
                    num_tokens = (event.get("usage") or {}).get("completion_tokens", num_tokens)
                    pieces = _pieces(event)
                except FORM_ERRORS as error:
                    raise wrong_event(line, "part of a chat completion") from error
                for piece in pieces:
                    first_s = first_s or time.monotonic()
                    yield piece
        self.speed = _speed(num_tokens, (first_s or time.monotonic()) - sent_s, time.monotonic() - sent_s)


def _pieces(event: dict[str, Any]) -> list[Piece]:
    deltas = [choice["delta"] for choice in event.get("choices", ())]
    found = [(delta.get(name), name) for delta in deltas for name in ("reasoning", "content")]
    return [Piece(text, is_reasoning=name == "reasoning") for text, name in found if text]


def _speed(num_tokens: int, first_s: float, total_s: float) -> str:
    parts = [f"{num_tokens} token{'s' * (num_tokens != 1)}", f"first after {first_s:.2f} s"]
    if num_tokens > 1 and total_s > first_s:
        parts.append(f"then {(num_tokens - 1) / (total_s - first_s):.1f} tokens/s")
    return f"[{', '.join(parts)}]"


def _loop(conversation: Conversation) -> None:
    # Importing readline gives input() line editing and history.
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401
    while True:
        try:
            text = input("> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            continue
        match text.strip():
            case "":
                continue
            case "/help":
                print(_HELP)
            case "/clear":
                conversation.messages.clear()
                print("New conversation.")
            case command if command.startswith("/") and command[1:].isalpha():
                print(f"Unknown command {command}. {_HELP}")
            case _:
                _answer(conversation, text)


def _answer(conversation: Conversation, text: str) -> None:
    """Print an answer and its speed. Errors are printed, too."""
    try:
        _print_answer(conversation, text)
        print(conversation.speed)
    except KeyboardInterrupt:
        print(" [stopped]")
    except ENDPOINT_ERRORS as error:
        print(f"[{error}]", file=sys.stderr)


def _print_answer(conversation: Conversation, text: str) -> None:
    with contextlib.closing(conversation.ask(text)) as answer:
        for piece in answer:
            dims = piece.is_reasoning and sys.stdout.isatty()
            print(_DIM.format(piece.text) if dims else piece.text, end="", flush=True)
    print()
