"""What rewards behind a server share: where and how they ask, and POST with retries. Standard library only, no proxies, no
redirects."""

from __future__ import annotations

import http.client
import os
import random
import re
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import TypeVar
from urllib.parse import urlsplit

from .base import Reward
from .errors import (
    RewardConfigError,
    RewardError,
    RewardInputError,
    RewardServiceError,
    RewardTimeoutError,
    require,
)
from .wire import decompress

T = TypeVar("T")
RETRY_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
MAX_ANSWER = 16 << 20


@dataclass(eq=False)
class ServiceReward(Reward):
    """Base of the rewards that ask a server.

    Args:
        url: http(s)://host[:port]/path
        token_env: name of the environment variable that holds the bearer token; "" for none. Tokens are never options, so
            that they end up in no config file and no log
        timeout_s: for one attempt
        deadline_s: for all attempts and the waits between them
        max_retries: further attempts after the first
        backoff_s: wait before the first retry; doubles each time, up to 10 s, and is shortened by up to a half at random
    """

    url: str
    _: KW_ONLY
    token_env: str = ""
    timeout_s: float = 60.0
    deadline_s: float = 300.0
    max_retries: int = 4
    backoff_s: float = 0.25

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            fits = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # a port that is no number or too large, half a pair of brackets
            fits = False
        shown = re.sub(r"//[^/@]*@", "//…@", self.url)  # a password in it is not repeated
        fits = fits and re.fullmatch(r"[!-~]+", self.url) is not None
        require(fits, f"url={shown!r} must look like http://host:port/path, with a port of 1 to 65535.")
        require(
            parts.username is None and not parts.fragment,
            f"url={shown!r} may hold no user name and no #: name the variable with the token as token_env.",
        )
        require(
            min(self.timeout_s, self.deadline_s) > 0 and self.max_retries >= 0 and self.backoff_s >= 0,
            f"{self!r}: timeouts must be positive, max_retries and backoff_s not negative.",
        )
        if self.token_env:
            token = os.environ.get(self.token_env, "")
            require(token != "", f"token_env={self.token_env!r}: this environment variable is not set, or empty.")
            require(
                re.fullmatch(r"[!-~]+", token) is not None,
                f"token_env={self.token_env!r}: its value holds white space or letters that no header takes (a line end?).",
            )

    def post(self, body: bytes, content_type: str, read: Callable[[bytes], T]) -> T:
        """Send `body` and return `read(answer)`.

        Retried: connection errors, timeouts, the statuses of an overloaded or broken server, and answers that `read`
        refuses with `RewardServiceError`. Not retried: statuses that say the request is wrong. When the attempts or the
        deadline run out, the last error is raised with their number.
        """
        end = time.monotonic() + self.deadline_s
        attempt = 0
        while True:
            attempt += 1
            try:
                left = max(end - time.monotonic(), 0.01)
                return read(self._once(body, content_type, min(self.timeout_s, left)))
            except RewardServiceError as error:
                wait = min(10.0, self.backoff_s * 2 ** (attempt - 1)) * random.uniform(0.5, 1.0)
                late = time.monotonic() + wait >= end
                if attempt > self.max_retries or late:
                    why = f"the deadline of {self.deadline_s} s" if late else f"{attempt} attempts"
                    raise type(error)(f"{error.message} (given up after {why})") from error
            time.sleep(wait)

    def _once(self, body: bytes, content_type: str, timeout: float) -> bytes:
        url, parts = self.url, urlsplit(self.url)
        headers = {"Content-Type": content_type, "Accept": "application/json"}
        if self.token_env:
            headers["Authorization"] = f"Bearer {os.environ[self.token_env]}"
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=timeout)
        try:
            connection.request("POST", (parts.path or "/") + (f"?{parts.query}" if parts.query else ""), body, headers)
            response = connection.getresponse()
            answer = response.read(MAX_ANSWER + 1)
            coding = response.getheader("Content-Encoding") or ("gzip" if answer[:2] == b"\x1f\x8b" else "")
        except TimeoutError as error:
            raise RewardTimeoutError(f"{url} gave no answer in {timeout:.1f} s.") from error
        except (OSError, http.client.HTTPException) as error:
            raise RewardServiceError(f"{url} could not be asked: {type(error).__name__}: {error}") from error
        finally:
            connection.close()
        require(len(answer) <= MAX_ANSWER, f"{url} answered with more than {MAX_ANSWER} bytes.", RewardInputError)
        try:
            answer = decompress(answer, coding, MAX_ANSWER)
        except ValueError as error:
            raise RewardServiceError(f"{url} gave an answer that cannot be read: {error}") from error
        if response.status in (301, 302, 303, 307, 308):
            raise RewardConfigError(
                f"{url} answered {response.status}, a redirect to {response.getheader('Location')!r}, which is not followed; "
                "give the address where the service is"
            )
        if response.status != 200:
            raise _status_error(url, response.status, answer)
        return answer


def _status_error(url: str, status: int, answer: bytes) -> RewardError:
    message = f"{url} answered {status}: {answer[:500].decode('utf-8', 'replace')}"
    if status in RETRY_STATUS:
        return RewardServiceError(message)
    if status in (400, 411, 413, 415, 422):
        return RewardInputError(message)
    return RewardConfigError(message)
