"""The limits of a request: one table, enforced by the gateway for good messages and by the worker against other front ends.

Units are in the names. The ranges of sampling parameters are in services/shared/sampling_parameters.py.
"""

from __future__ import annotations

MAX_N = 128  # choices of one request
MAX_BATCH_PROMPTS = 1024  # prompts of one completions request
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIAS_ENTRIES = 1024
MAX_STOP_REGEXES = 8
MAX_STOP_REGEX_CHARS = 512
MAX_TOP_LOGPROBS = 20
MAX_LOGPROB_TOKEN_IDS = 256
MAX_LOGPROB_VALUES = 4 << 20  # one request's log probabilities, over all tokens of all its choices
MAX_REPEATED_LOGPROB_VALUES = 1 << 18  # of a stream whose every event repeats those so far
MAX_TOKEN_ID_SET = 65536  # allowed_token_ids, banned_token_ids
MAX_REQUEST_SET_IDS = 1 << 20  # ids of both sets times choices
MAX_DRY_BREAKERS = 32
MAX_DRY_BREAKER_CHARS = 64
MAX_DRY_ALLOWED_LENGTH = 1024
MAX_DRY_WINDOW = 1 << 20
MAX_TOKEN_TEXTS = 65536  # ids whose texts one call asks a detokenizer for
MAX_GUIDED_CHOICES = 1024  # of structured output: texts of which the answer must be one
MAX_GRAMMAR_BYTES = 1 << 20  # a schema, pattern or grammar
MAX_SESSION_ID_CHARS = 256
MAX_ROUTING_KEY_CHARS = 256
MAX_REQUEST_ID_CHARS = 256
MAX_CACHE_SALT_CHARS = 256
MAX_REVISION_CHARS = 256
MAX_HEAD_BYTES = 64 << 10  # request line and headers of an HTTP request, or what follows a chunked body
MAX_HEAD_SECONDS = 10.0  # from its first byte, or from the connection's begin, to its last
MAX_BODY_BYTES = 64 << 20  # an HTTP request's body
MAX_MESSAGE_BYTES = 64 << 20  # one gRPC message
MAX_CHAT_MESSAGES = 4096
MAX_CONTENT_PARTS = 1024  # of one chat message
MAX_REQUEST_CONTENT_PARTS = 16384  # of all its messages
MAX_RENDERED_CHARS = 16 << 20  # a chat template's output
MAX_TEMPLATE_SECONDS = 5.0

PRIORITY_RANGE = (-(1 << 31), (1 << 31) - 1)
