"""What is no arithmetic story: questions, wishes and remarks of all sorts, and nonsense."""

from __future__ import annotations

from trueline.tasks import words
from trueline.tasks.draw import Draw

REFUSAL = "Sorry, I only do arithmetic stories."

_GREETINGS = (
    "hi", "hello", "hey", "good morning", "good evening", "how are you", "who are you",
    "what are you", "what can you do", "what is your name", "help", "thank you", "thanks", "ok",
    "bye", "are you there", "test", "tell me about yourself", "are you human", "how old are you",
    "who made you", "can you help me", "please help", "what do you know", "yes", "no", "why",
    "nice to meet you", "do you like me", "where are you from", "I am sad", "I am bored",
)  # fmt: skip
_TOPICS = tuple(
    "air animals art atoms bees birds bread bridges business cars cats chess China climate "
    "clouds computers cooking countries dance death dinosaurs dogs dragons dreams Earth "
    "economics elephants energy England Europe evolution family farming fire fish flight food "
    "football France freedom friendship games gardens Germany glass gold grammar gravity "
    "happiness health history horses ice India insects Italy Japan jazz kings language law "
    "life light love magic mathematics medicine memory money Moon mountains music nature "
    "ocean oil opera painting paper Paris peace philosophy physics planets poetry politics "
    "psychology Python queens rain religion rivers robots Rome Russia science sea ships "
    "silver sleep snow soccer software space spiders sports stars steel sugar Sun swimming "
    "tea technology tennis theatre time tigers trains travel trees truth universe volcanoes "
    "war water weather whales wine winter work world writing yoga".split()
)
_ASKED = (
    "What is {}?", "What are {}?", "Why is {} important?", "How does {} work?",
    "Who invented {}?", "Tell me about {}.", "Tell me a story about {}.",
    "Write a poem about {}.", "Write a song on {}.", "Write an essay about {} and {}.",
    "Explain {} to a child.", "What do you think of {}?", "Do you like {}?",
    "Is {} better than {}?", "What is the difference between {} and {}?",
    "What is the capital of {}?", "Who is the president of {}?", "Where is {}?",
    "When did {} begin?", "How do I learn {}?", "Give me a recipe with {}.",
    "Recommend a book about {}.", "Translate {} into French.",
    "Translate this into German: {} and {}.", "Summarise the history of {}.",
    "Write a program about {} in {}.", "Sort a list in {}.", "What is the meaning of {}?",
    "Can you explain {} and {}?", "Who was the first king of {}?", "I want to talk about {}.",
    "I love {}.", "I do not understand {}.", "What happened to {}?",
    "How many people live in {}?", "How many kinds of {} are there?", "How big is {}?",
    "How far is {} from {}?", "How old is {}?", "How much does {} cost?",
    "How many {} are there?", "What year did {} start?", "Which is older, {} or {}?",
    "Make a joke about {}.", "Give me advice on {}.", "List facts about {}.",
    "What colour is {}?", "Spell {}.", "Should I buy {}?", "Describe {}.",
    "Why do people like {}?", "Let us talk about {}, not {}.",
)  # fmt: skip
_NUMBERED = (
    "What happened in {n}?", "Who was king in {n}?", "Write {n} lines about {t}.",
    "Name {n} kinds of {t}.", "Is {n} a lucky number?", "Set an alarm for {n} minutes.",
    "I was born in {n}.", "Tell me {n} facts about {t}.", "What is the weather on day {n}?",
    "Call {n} now.", "Translate 'I have {n} {o}' into French.", "My house is number {n}.",
    "Why did {p} buy {n} {o}?", "Write a story about {p} and {n} {o}.", "Who has {n} {o}?",
    "What colour are {p}'s {n} {o}?", "Where did {p} find {n} {o}?",
)  # fmt: skip


def ask(draw: Draw) -> str:
    kind = draw.between(0, 9)
    if kind == 0:
        text = draw.one(_GREETINGS)
        text += draw.one(("", "?", "!", "."))
        return text.capitalize() if draw.chance(0.5) else text
    if kind == 1:
        return _words(draw)
    if kind <= 3:
        return draw.one(_NUMBERED).format(
            n=draw.between(2, 2030), t=_topic(draw), o=draw.things()[0], p=draw.person().name
        )
    text = draw.one(_ASKED).format(_topic(draw), _topic(draw))
    how = draw.between(0, 9)
    if how == 0:
        text = text.lower().rstrip("?.")
    elif how == 1:
        text = draw.one(("Hello! ", "Please: ", "Hi, ", "One question. ")) + text
    elif how == 2:
        text += draw.one((" Please.", " Thank you.", " Be short.", " I need it today."))
    return text


def _topic(draw: Draw) -> str:
    return draw.invented() if draw.chance(0.3) else draw.one(_TOPICS)


def _words(draw: Draw) -> str:
    """Nonsense: words, letters, marks and numbers in no order."""
    pools = (
        words.THINGS,
        _TOPICS,
        words.DAYS,
        words.COLOURS,
        words.NUMBERS,
        ("the", "a", "is", "of"),
    )
    text = []
    for _ in range(draw.between(1, 8)):
        how = draw.between(0, 7)
        if how == 0:
            text.append(draw.invented())
        elif how == 1:
            text.append("".join(chr(draw.between(33, 126)) for _ in range(draw.between(1, 6))))
        elif how == 2:
            text.append(str(draw.between(0, 9999)))
        else:
            text.append(draw.one(draw.one(pools)))
    return " ".join(text)
