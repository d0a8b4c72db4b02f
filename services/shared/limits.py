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
MAX_SCHEMA_PROPERTIES = 8192  # of all objects of a JSON schema
MAX_OPTIONAL_PROPERTIES = 1024  # of one object: any of them may come next
MAX_SCHEMA_VALUES = 16384  # of all its enums
MAX_SCHEMA_NODES = 1 << 16  # values, arrays and objects that a schema is written with
MAX_CALL_DEPTH = 64  # of objects and arrays in the arguments of a call that a model writes; a deeper one breaks off
MAX_HELD_CALL_CHARS = 1 << 20  # of an output, held until it is known whether it is a call, or until a value of one ends
MAX_KEPT_TOKENS = 64  # special tokens that a format of calls or reasoning needs to see
MAX_TOOLS = 512  # of a request
MAX_TOOL_NAME_CHARS = 256
MAX_CALLS = 512  # of tools, that an answer is let through with
MAX_SESSION_ID_CHARS = 256
MAX_STORED_ID_CHARS = 128  # of a response, a conversation, an item
MAX_RECORD_BYTES = 8 << 20  # of a response, or a conversation, that is kept
MAX_RESPONSE_CHAIN = 1024  # responses that one follows
MAX_CHAIN_BYTES = 16 << 20  # that they have together
MAX_CONVERSATION_ITEMS = 20  # that are added at once
MAX_METADATA = 16  # names
MAX_METADATA_NAME_CHARS = 64
MAX_METADATA_CHARS = 512
MAX_ROUTING_KEY_CHARS = 256
MAX_REQUEST_ID_CHARS = 256
MAX_CACHE_SALT_CHARS = 256
MAX_ADDRESS_CHARS = 256  # of another worker
MAX_REVISION_CHARS = 256
MAX_TENANT_BYTES = 16
MAX_HEAD_BYTES = 64 << 10  # request line and headers of an HTTP request, or what follows a chunked body
MAX_HEAD_SECONDS = 10.0  # from its first byte, or from the connection's begin, to its last
MAX_BODY_BYTES = 64 << 20  # an HTTP request's body
SMALL_BODY_BYTES = 64 << 10  # a body that never waits behind larger ones
SMALL_BODY_POOL_BYTES = 32 << 20  # of all small bodies that a gateway holds at once
MAX_JSON_VALUES = 2 << 20  # of an HTTP request's body, counted as its commas and opening brackets, those in texts too
JSON_VALUE_BYTES = 40  # that a parsed one is taken for: a token id in a list
BODY_STEP_BYTES = 1 << 20  # in which a larger body that does not say its size is given room
MAX_WAITING_BODIES = 128  # of each pool; what has come of one while it waits is at most what a connection reads ahead
MAX_MESSAGE_BYTES = 64 << 20  # one gRPC message
MAX_CHAT_MESSAGES = 4096
MAX_CONTENT_PARTS = 1024  # of one chat message
MAX_REQUEST_CONTENT_PARTS = 16384  # of all its messages
MAX_RENDERED_CHARS = 16 << 20  # of a request's texts, and of a chat template's output
MAX_TEMPLATE_SECONDS = 5.0
MAX_ENCODING_BYTES = 16 << 20  # of texts that a tokenizer renders and encodes at the same time; short ones have as much again
MAX_ENCODING_WAIT_S = 5.0  # for a share of it
SHORT_ENCODING_BYTES = 32 << 10  # of a request that goes to a tokenizer in one message with others
HUGE_ENCODING_BYTES = 1 << 20  # of a request of which a gateway sends two at a time to a tokenizer
MAX_OPEN_ENCODINGS = 1024  # of one gateway at one tokenizer, of that kind
MAX_WORD_CHARS = 1 << 20  # of a text without a place where it may be cut to be encoded in pieces
MAX_KEYS = 10_000  # in the file of API keys
MAX_KEYS_FILE_BYTES = 4 << 20
MAX_KEY_CHARS = 512
MAX_KEY_NAME_CHARS = 64
MAX_SECRETS_OF_A_KEY = 8
MAX_KEY_LIMIT = 1 << 40  # requests, tokens
MAX_KEY_WEIGHT = 1e6

PRIORITY_RANGE = (-(1 << 31), (1 << 31) - 1)
