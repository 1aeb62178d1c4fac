"""The text that the tiny target learns: small cooking conversations composed by a grammar of ours.

A request names a dish (main ingredient and form), a style, a number of people and what is wanted. The answer
follows from it line by line: amounts scale with the people, preparation and cooking time come from the main
ingredient, the steps from the form, one ingredient and one step from the style. Where a line has more than one
possible wording, one is drawn; so the text has some entropy, and every answer can be checked against the grammar.
"""

import hashlib
import math
import random
import re
from dataclasses import dataclass
from typing import Literal

from examples.tiny_target.dishes import PEOPLE, SAVOURY_FORMS, SAVOURY_STYLES, SWEET_STYLES, Form, Main, dishes

Lines = list[tuple[str, ...]]
"""An answer before any choice is made: per line, the wordings that may stand there."""


ASK_RECIPE = (
    "How do I make {dish} for {people}?",
    "Can you give me a recipe for {dish}? We are {people}.",
    "I would like to cook {dish} for {people} people tonight.",
    "Please explain how to prepare {dish} for {people} people.",
    "What is a good recipe for {dish} that serves {people}?",
    "Teach me to cook {dish} for {people}.",
    "My friends want {dish}. There are {people} of us. What should I do?",
    "{people} hungry people, one wish: {dish}. Help!",
)
ASK_SHOPPING = (
    "What do I need to buy for {dish} for {people}?",
    "Write a shopping list for {dish} for {people} people.",
    "Which ingredients go into {dish} for {people}?",
)
ASK_TIME = (
    "How long does it take to cook {dish} for {people}?",
    "Is {dish} for {people} people quick to make?",
    "How much time should I plan for {dish} for {people}?",
)
ASK_KEEP = ("How do I keep the leftovers?", "How long does it keep?", "Can I store what is left?")
ASK_INSTEAD = ("I have no {main}. What can I use?", "What can I take instead of the {main}?")

Want = Literal["recipe", "shopping", "time"]


@dataclass(frozen=True)
class Request:
    """One conversation to be held: the facts, the wording of the question, and an optional second question."""

    main: Main
    form: Form
    style: str
    people: int
    want: Want
    wording: str
    follow_up: str | None

    @property
    def dish(self) -> str:
        return f"{self.style} {self.main.name} {self.form.name}"

    @property
    def questions(self) -> list[str]:
        """The user's turns."""
        question = self.wording.format(dish=self.dish, people=PEOPLE[self.people])
        questions = [question[0].upper() + question[1:]]
        if self.follow_up is not None:
            questions.append(self.follow_up.format(main=self.main.plural))
        return questions

    @property
    def answers(self) -> list[Lines]:
        """The assistant's turns, every wording still open."""
        answers = [{"recipe": _recipe, "shopping": _shopping, "time": _time}[self.want](self)]
        if self.follow_up in ASK_KEEP:
            answers.append([(self.form.keep,)])
        elif self.follow_up is not None:
            instead, plural = self.main.instead, self.main.plural
            answers.append([(f"You can use {instead} instead of the {plural}.", f"Take {instead}, it works as well.")])
        return answers


def is_held_out(main: Main, form: Form) -> bool:
    """Whether the dish is kept for the held-out questions: about one in ten, by a hash, so that no seed changes it."""
    return hashlib.sha256(f"{main.name} {form.name}".encode()).digest()[0] % 8 == 0


def draw_request(rng: random.Random, held_out: bool | None = None) -> Request:
    """Draw a request: about a held-out dish (True), about one of the others (False), or about any dish (None)."""
    main, form = rng.choice([dish for dish in dishes() if held_out is None or is_held_out(*dish) == held_out])
    styles = SAVOURY_STYLES if form in SAVOURY_FORMS else SWEET_STYLES
    want: Want = rng.choices(("recipe", "shopping", "time"), (0.7, 0.2, 0.1))[0]
    wording = rng.choice({"recipe": ASK_RECIPE, "shopping": ASK_SHOPPING, "time": ASK_TIME}[want])
    follow_up = rng.choice(ASK_KEEP + ASK_INSTEAD) if rng.random() < 0.25 else None
    return Request(main, form, rng.choice(list(styles)), rng.choice(list(PEOPLE)), want, wording, follow_up)


def draw_answers(rng: random.Random, request: Request) -> list[dict[str, str]]:
    """Answer a request with wordings drawn from the grammar: the conversation's messages."""
    messages = []
    for question, lines in zip(request.questions, request.answers, strict=True):
        answer = "\n".join(rng.choice(wordings) for wordings in lines)
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return messages


def is_possible(lines: Lines, answer: str) -> bool:
    """Whether the grammar could have said `answer`: every line is one of the wordings that may stand there."""
    said = answer.split("\n")
    return len(said) == len(lines) and all(line in wordings for line, wordings in zip(said, lines, strict=True))


def entropy(lines: Lines) -> float:
    """Nats of choice in an answer: what no model can predict of it."""
    return sum(math.log(len(wordings)) for wordings in lines)


def _ingredients(request: Request) -> list[str]:
    styles = SAVOURY_STYLES if request.form in SAVOURY_FORMS else SWEET_STYLES
    amounts = [request.main.amount, *request.form.ingredients, styles[request.style][0]]
    scale = request.people // 2  # the tables are for two people
    return [re.sub(r"\{(\d+)\}", lambda number: str(int(number[1]) * scale), amount) for amount in amounts]


def _recipe(request: Request) -> Lines:
    styles = SAVOURY_STYLES if request.form in SAVOURY_FORMS else SWEET_STYLES
    dish, people = request.dish, PEOPLE[request.people]
    steps = [request.main.prepare, *request.form.steps, (styles[request.style][1],)]
    filled = [
        tuple(wording.format(main=request.main.plural, minutes=request.main.minutes) for wording in step)
        for step in steps
    ]
    return [
        (f"Here is how to make {dish} for {people}.", f"This recipe for {dish} serves {people}."),
        ("Ingredients:",),
        *((f"- {ingredient}",) for ingredient in _ingredients(request)),
        ("Steps:",),
        *(tuple(f"{number}. {wording}" for wording in step) for number, step in enumerate(filled, start=1)),
        request.form.serve,
    ]


def _shopping(request: Request) -> Lines:
    *most, last = _ingredients(request)
    listed = f"{', '.join(most)} and {last}"
    start = f"For {request.dish} for {PEOPLE[request.people]} you need "
    return [(f"{start}{listed}.", f"{start}the following: {listed}."), ("Buy the freshest you can find.",)]


def _time(request: Request) -> Lines:
    before, plural = request.form.base_minutes, request.main.plural
    return [
        (
            f"Plan {before} minutes for the preparation of {request.dish}; then the {plural} have to cook.",
            f"You need {before} minutes to prepare {request.dish}, then the {plural} have to cook.",
        ),
        ("It is quick enough for a weekday.",) if before <= 15 else ("Better make it on a day off.",),
    ]
