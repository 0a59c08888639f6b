"""Work that a client's body asks for, and its outcome, in the form that crosses processes."""

from collections.abc import Callable
from enum import StrEnum

import msgspec

from cluster.spec.wire import Tagged, from_wire, to_wire
from router.errors import ApiError
from router.message import Thinking
from router.request import GenerateRequest

LENGTH_BYTES = 8
"""Size of the little-endian length before every message."""


class Route(StrEnum):
    """Routes whose bodies are preprocessed."""

    COMPLETIONS = "/v1/completions"
    CHAT = "/v1/chat/completions"
    RESPONSES = "/v1/responses"
    TOKENIZE = "/tokenize"
    DETOKENIZE = "/detokenize"


class Job(Tagged, frozen=True, kw_only=True):
    route: Route
    body: bytes
    max_tokens: int
    """Maximum length of prompt and answer together, limited by the model and the replicas' KV pools."""
    salt: str = ""
    """Salt of all of the client's requests, to which a body can add its own."""
    with_keys: bool = False
    """True if replicas are chosen by the pages that they have cached."""


class AnswerOptions(Tagged, frozen=True, kw_only=True):
    """Options of an answer, which do not concern the replicas."""

    include_usage: bool = False
    continuous_usage: bool = False
    return_token_ids: bool = False
    num_prompt_logprobs: int | None = None


class CompletionOptions(AnswerOptions, frozen=True, kw_only=True):
    echoes: list[str] = []
    """Text of every prompt; empty unless the response repeats them."""
    with_logprobs: bool = False
    skip_special_tokens: bool = True
    """True if the echoes lack the special tokens of their prompts."""


class AnswerForm(msgspec.Struct, frozen=True):
    """Content that the text of an answer may have besides the answer itself."""

    thinking: Thinking = Thinking.NONE
    functions: dict[str, dict[str, list[str]]] | None = None
    """Functions that the model may call, with the JSON types of parameters that it writes one by one; None if it must
    not call any."""


class ChatOptions(AnswerOptions, frozen=True, kw_only=True):
    form: AnswerForm
    include_reasoning: bool = True


class ResponseOptions(AnswerOptions, frozen=True, kw_only=True):
    """Options of ``/v1/responses``."""

    form: AnswerForm = AnswerForm()
    encrypts_reasoning: bool = False
    fields: bytes
    """Fields of the response that repeat the request, as a JSON object."""


class Preprocessed(Tagged, frozen=True, kw_only=True):
    """Everything that the router has to know of a body."""

    requests: list[GenerateRequest]
    """One request per prompt, without the facts that the HTTP headers give."""
    options: CompletionOptions | ChatOptions | ResponseOptions
    num_choices: int = 1
    stream: bool = False
    priority: int | None = None
    dp_rank: int | None = None
    session_id: str = ""
    page_keys: list[list[bytes]] = []
    """Keys of the pages of every prompt; empty if the prompts are so short that the router computes them."""


class JsonText(Tagged, frozen=True, kw_only=True):
    """Complete response body."""

    text: bytes


class JobRefusal(Tagged, frozen=True, kw_only=True):
    status: int
    message: str
    param: str | None
    code: str | None

    @classmethod
    def of(cls, error: ApiError) -> "JobRefusal":
        return cls(status=error.status, message=str(error), param=error.param, code=error.code)

    @property
    def error(self) -> ApiError:
        return ApiError(self.status, self.message, self.param, self.code)


class Setup(Tagged, frozen=True, kw_only=True):
    """First message to a process."""

    config: str
    """Deploy file as JSON."""
    folder: str
    """Model folder."""


class Ready(Tagged, frozen=True, kw_only=True):
    """First message from a process, once it has read the model."""


Outcome = Preprocessed | JsonText | JobRefusal | Ready
encode: Callable[[Setup | Job | Outcome], bytes] = msgspec.msgpack.Encoder(enc_hook=to_wire).encode
decode_outcome: Callable[[bytes], Outcome] = msgspec.msgpack.Decoder(Outcome, dec_hook=from_wire).decode
decode_job: Callable[[bytes], Setup | Job] = msgspec.msgpack.Decoder(Setup | Job).decode
