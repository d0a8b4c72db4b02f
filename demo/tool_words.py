"""Words and sentence forms for tools and their questions."""

ATTRIBUTES = tuple(
    """
    address age altitude area author balance birthday boss budget capital capacity captain career climate color
    continent cost country currency date deadline director distance doctor duration email employer forecast friend
    grade height hobby humidity job language leader length level location manager mayor name nickname number owner
    password phone population position president price profession rating salary score size speed stock street
    teacher team temperature time title value weather weight winner year
    """.split()  # noqa: SIM905
)
KINDS = tuple(
    """
    account animal author book building bridge city client company country course customer employee event film
    flight game hotel island item lake manager member mountain movie museum order park patient person place planet
    player product project restaurant river room school shop song station student team town train user village
    """.split()  # noqa: SIM905
)

NAME_FORMS = ("get_{}", "get_{}", "get_{}", "find_{}", "lookup_{}", "{}_of", "fetch_{}", "{}", "query_{}", "read_{}", "{}_lookup")
DESCRIPTIONS = (
    "Get the {a} of a {k}.",
    "Get the {a} of a {k}.",
    "Get the {a} in a {k}.",
    "Get the current {a} for a {k}.",
    "Returns the {a} of the given {k}.",
    "The {a} of a {k}.",
    "Look up the {a} of a {k}",
    "Look up a {k}'s {a}.",
    "Find the {a} for a {k}.",
    "Tells the {a} of one {k}.",
    "{a} of a {k}",
)
ASKS = (
    "What is {}?",
    "What is {}?",
    "What is {}?",
    "What's {}?",
    "what is {}?",
    "Tell me {}.",
    "Give me {}.",
    "Find {}.",
    "Look up {}.",
    "I need {}.",
    "Please tell me {}.",
    "Can you tell me {}?",
)
RESULT_WORDS = ("sunny", "cloudy", "rainy", "cold", "warm", "open", "closed", "high", "low", "unknown", "yes", "no")
UNITS = ("degrees", "km", "C", "euros", "percent", "points")
