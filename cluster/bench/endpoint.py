"""Parts of the OpenAI protocol that `baton chat` and the load generator share."""

import json
from typing import Any

import httpx

from cluster.spec.env import API_KEY


class EndpointError(Exception):
    """Endpoint error, such as a refusal or an incomplete response, described for the user."""


ENDPOINT_ERRORS = (EndpointError, httpx.HTTPError, httpx.InvalidURL, ValueError)
"""Errors of an endpoint or its URL. A host that is no name, and an event that is no object, are ValueErrors."""
FORM_ERRORS = (LookupError, TypeError, AttributeError)
"""Errors of reading an object that has another form than expected."""


def key_headers() -> dict[str, str]:
    """Return the authorization header, or no header if the environment has no API key.

    Raises:
        UserError: the key is invalid.
    """
    key = API_KEY.get()
    return {"authorization": f"Bearer {key}"} if key is not None else {}


def checked(response: httpx.Response, prefix: str = "") -> httpx.Response:
    """Return a response with status 200. Raise EndpointError for any other one, after ``prefix``."""
    if response.status_code == 200:
        return response
    response.read()
    hint = f"; set {API_KEY.name}" if response.status_code == 401 else ""
    raise EndpointError(f"{prefix}HTTP {response.status_code}: {error_message(response.text)}{hint}")


def first_model(client: httpx.Client) -> str:
    """Return the name of the endpoint's first model.

    Raises:
        EndpointError: the endpoint lists no model, or responds with an error.
    """
    response = checked(client.get("/v1/models"), "/v1/models: ")
    try:
        return str(response.json()["data"][0]["id"])
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise EndpointError(f"/v1/models: got {response.text[:80]!r}; expected a list of models") from error


def count_tokens(client: httpx.Client, model: str, text: str) -> int:
    """Return the number of tokens of a text.

    Raises:
        EndpointError: the endpoint responds with an error.
    """
    response = client.post("/tokenize", json={"model": model, "prompt": text, "add_special_tokens": False})
    return int(checked(response, "/tokenize: ").json()["count"])


def parse_line(line: str) -> dict[str, Any] | None:
    """Return the object in a line of an event stream, or None if the line has no object.

    Raises:
        EndpointError: the event reports an error.
        ValueError: the data is not a JSON object.
    """
    text = line.removeprefix("data:").strip()
    if not line.startswith("data:") or text == "[DONE]":
        return None
    try:
        event = json.loads(text)
    except RecursionError as error:
        raise ValueError(f"the stream has an event that is nested too deeply: {text[:80]!r}") from error
    if not isinstance(event, dict):
        raise wrong_event(text, "a JSON object")
    if "error" in event:
        raise EndpointError(error_message(text))
    return event


def wrong_event(text: str, expected: str) -> ValueError:
    return ValueError(f"the stream has the event {text[:80]!r}, which is not {expected}")


def error_message(body: str) -> str:
    """Return the message of an OpenAI error, or the beginning of any other response body."""
    try:
        error = json.loads(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError, RecursionError):
        return body.strip()[:200] or "empty response"
