"""What is told of a prompt fits into one message, with as much again to spare."""

import msgspec
import pytest

from cluster.channel import MAX_FRAME_BYTES, encode
from cluster.spec.ids import Incarnation, ReplicaId, Room
from cluster.spec.messages import Output
from cluster.spec.sampling import TokenLogprobs
from router.api.intake import _LOGPROBS_BYTES, _TOP_LOGPROB_BYTES, check_prompt_logprobs
from router.errors import ApiError


@pytest.mark.parametrize("num_top", [0, 1, 20])
def test_no_token_takes_more_than_is_reckoned_with(num_top: int) -> None:
    told = TokenLogprobs(logprob=-1 / 3, rank=2**20, top_ids=[2**20] * num_top, top_logprobs=[-1 / 3] * num_top)
    empty = Output(room=Room(1), replica=ReplicaId("decode-0"), incarnation=Incarnation(1), first_index=0, token_ids=[])
    frames = [len(encode(msgspec.structs.replace(empty, prompt_logprobs=[told] * num))) for num in (100, 200)]
    assert frames[1] - frames[0] <= 100 * (_LOGPROBS_BYTES + num_top * _TOP_LOGPROB_BYTES)


def test_longer_prompts_are_refused_in_words() -> None:
    allowed = MAX_FRAME_BYTES // 2 // (_LOGPROBS_BYTES + 20 * _TOP_LOGPROB_BYTES)
    check_prompt_logprobs(allowed, 20)
    check_prompt_logprobs(10**9, None)
    with pytest.raises(ApiError, match=f"with 20 per token at most {allowed} tokens, got {allowed + 1}"):
        check_prompt_logprobs(allowed + 1, 20)
