"""Tools for the agents of all frameworks, and questions that need these tools."""

import os

URL = os.environ["ROOTSTOCK_URL"]
MODEL = "demo"
MAYORS = {"Lima": "Ada", "Oslo": "Hugo"}
AGES = {"Ada": "52", "Hugo": "37"}
QUESTIONS = {
    "What is the age of the mayor of Lima?": ("52", ["get_mayor", "get_age"]),
    "What is the age of the mayor of Oslo?": ("37", ["get_mayor", "get_age"]),
    "What is 17 + 25?": ("17 + 25 = 42", []),
}
called: list[str] = []


def get_mayor(city: str) -> str:
    """Get the mayor of a city."""
    called.append("get_mayor")
    return MAYORS.get(city, "nobody")


def get_age(person: str) -> str:
    """Get the age of a person."""
    called.append("get_age")
    return AGES.get(person, "unknown")


def check(question: str, answer: str) -> None:
    """Checks the agent's answer, and the tools that it has called since the last check."""
    expected, names = QUESTIONS[question]
    assert called == names, (question, called, answer)
    assert expected in answer, (question, answer)
    called.clear()
    print(f"{question} -> {answer}")
