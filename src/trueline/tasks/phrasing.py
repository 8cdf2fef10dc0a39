"""The same story in other words: in the past, told by oneself, two sentences joined."""

from __future__ import annotations

import re

from trueline.tasks.draw import Draw, Person
from trueline.tasks.words import NUMBERS, RELATIVES

PAST = dict(
    verb.split("/")
    for verb in (
        "are/were arrive/arrived bakes/baked break/broke breaks/broke brings/brought "
        "builds/built buys/bought catches/caught collects/collected come/came costs/cost "
        "drops/dropped earns/earned eats/ate fills/filled finds/found fly/flew get/got gets/got "
        "give/gave gives/gave go/went has/had holds/held is/was join/joined keeps/kept "
        "land/landed learns/learned leave/left loses/lost makes/made owns/owned paints/painted "
        "pays/paid picks/picked puts/put reads/read runs/ran saves/saved scores/scored sees/saw "
        "sells/sold share/shared shares/shared spends/spent starts/started swim/swam takes/took "
        "throws/threw uses/used walks/walked wants/wanted washes/washed wins/won works/worked "
        "writes/wrote"
    ).split()
)
"""Verbs that are no nouns of a story. But for `paints`, with which the models were trained."""
_VERB = re.compile(rf"\b({'|'.join(PAST)})\b")
_SMALL = (
    *("A", "An", "At", "He", "Later", "On", "She", "The", "There"),
    *(number.capitalize() for number in NUMBERS),
)
"""Small inside a sentence."""
_JOINED = re.compile(rf"\band (then )?({'|'.join(verb for verb in PAST if verb[-1] == 's')})\b")
_OWNED = rf" (?=(?:birthday|{'|'.join(RELATIVES)})\b)"
OWN = {"has": "have", "had": "had", "catches": "catch", "washes": "wash", "does": "do", "is": "am"}
"""What `I` says where that is not the verb without its s."""


def in_the_past(sentence: str) -> str:
    return _VERB.sub(lambda found: PAST[found[0]], sentence)


def of_oneself(text: str, me: Person) -> str:
    """`me` says it: I have, give me, my bag."""
    name, subject = re.escape(me.name), me.subject
    text = re.sub(rf"\bdoes (?:{name}|{subject.lower()})\b", "do I", text)
    text = re.sub(rf"\b{name}'s\b", "my", text)
    text = re.sub(
        rf"\b(?:{name}|{subject}|{subject.lower()}) ([a-z]+)\b", lambda m: f"I {_own(m[1])}", text
    )
    text = re.sub(rf"\b{me.his}{_OWNED}", "my ", text)
    text = re.sub(rf"\b{me.his.capitalize()}{_OWNED}", "My ", text)
    text = _JOINED.sub(lambda m: f"and {m[1] or ''}{_own(m[2])}", text)
    return re.sub(rf"\b{me.him}\b", "me", text)


def _own(verb: str) -> str:
    return OWN.get(verb, verb.removesuffix("s"))


def _joined(draw: Draw, sentences: list[str], me: Person) -> list[str]:
    """Now and then two sentences that begin with the same person become one."""
    who = rf"(?:{re.escape(me.name)}|{me.subject}|{me.subject.lower()})"
    told = sentences[:1]
    for sentence in sentences[1:]:
        begins = re.match(rf"(Then )?{who} (?=[a-z])", sentence)
        same = re.match(rf"(?:Then )?{who} [a-z]", told[-1]) and " and " not in told[-1]
        if begins and same and " had " not in told[-1] and draw.chance(0.15):
            then = "then " if begins[1] else ""
            told[-1] = f"{told[-1][:-1]} and {then}{sentence[begins.end() :]}"
        else:
            told.append(sentence)
    return told


def _asked_at_once(sentence: str, question: str) -> str:
    """If this is so, how many are there?"""
    lower = sentence.split()[0] in _SMALL
    first = sentence[0].lower() if lower else sentence[0]
    return f"If {first}{sentence[1:-1]}, {question[0].lower()}{question[1:]}"


def rephrase(
    draw: Draw, sentences: list[str], question: str, me: Person | None
) -> tuple[list[str], str]:
    if me is not None:
        sentences = _joined(draw, sentences, me)
    if draw.chance(0.25):
        sentences = [in_the_past(sentence) for sentence in sentences]
    if me is not None and draw.chance(0.12):
        sentences = [of_oneself(sentence, me) for sentence in sentences]
        question = of_oneself(question, me)
    if draw.chance(0.04) and not sentences[-1].startswith("Then "):
        *sentences, last = sentences
        question = _asked_at_once(last, question)
    return sentences, question
