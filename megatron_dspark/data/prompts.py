"""Prompts of our own: cooking recipes (narrow) and everyday questions (broad), the same on every machine.

A drafter learns a narrow domain in minutes and general conversation in days, so the quickstart trains on recipes and
keeps the general set to show the difference honestly. Every prompt is subject × wording; train and held-out sets share
wordings but no subject, so no held-out text can occur in training.
"""

import random
from collections.abc import Sequence
from typing import Any, Literal

from megatron_dspark.errors import DSparkError

Split = Literal["train", "heldout"]

# Every fifth subject is held out (position, not a draw: the split can never change with a seed).
_HELDOUT_EVERY = 5

_DISHES = (
    "banana bread", "tomato soup", "vegetable lasagna", "chicken curry", "apple pie", "beef stew", "pancakes",
    "mushroom risotto", "potato salad", "lentil soup", "chocolate chip cookies", "shepherd's pie", "pumpkin soup",
    "spaghetti carbonara", "guacamole", "fried rice", "hummus", "carrot cake", "fish tacos", "meatballs",
    "macaroni and cheese", "French toast", "Caesar salad", "chili con carne", "vegetable stir-fry", "garlic bread",
    "roast chicken", "blueberry muffins", "minestrone", "pesto pasta", "coleslaw", "quiche", "omelette",
    "sweet potato fries", "falafel", "beef burgers", "pad thai", "rice pudding", "cornbread", "waffles",
    "stuffed peppers", "tiramisu", "gazpacho", "pulled pork", "lemon bars", "ratatouille", "miso soup",
    "shakshuka", "bread pudding", "crepes", "chicken noodle soup", "mashed potatoes", "zucchini bread",
    "spinach lasagna", "cheesecake", "brownies", "Greek salad", "butternut squash soup", "beef stroganoff", "scones",
    "oatmeal cookies", "chicken pot pie", "fajitas", "egg salad", "onion soup", "salmon fillets", "baked ziti",
    "cauliflower curry", "peach cobbler", "clam chowder", "tabbouleh", "enchiladas", "lemon chicken", "gingerbread",
    "paella", "potato gratin", "black bean soup", "cinnamon rolls", "sushi rolls", "eggplant parmesan", "bruschetta",
    "peanut noodles", "vegetable curry", "apple crumble", "fish and chips", "chicken salad", "granola", "gnocchi",
    "stuffed mushrooms", "split pea soup", "sloppy joes", "rhubarb pie", "baked beans", "cucumber salad",
    "teriyaki salmon", "jambalaya", "naan", "pizza dough", "vanilla custard", "turkey chili", "broccoli soup",
    "chicken fried rice", "strawberry jam", "spring rolls", "pea risotto", "tuna casserole", "chickpea stew",
    "key lime pie", "dumplings", "chicken parmesan", "sourdough bread", "leek and potato soup", "lamb kebabs",
    "fruit salad", "meatloaf", "shortbread", "goulash", "cabbage rolls", "roasted vegetables", "quinoa salad",
    "shrimp scampi", "bean burritos", "pecan pie", "hash browns", "ramen", "chocolate mousse", "chicken wings",
    "tomato sauce", "moussaka", "banana smoothie", "beef tacos", "pumpkin pie", "corn chowder", "pasta salad",
    "buttermilk biscuits", "potato pancakes", "vegetable soup", "sponge cake", "lobster bisque", "pot roast",
    "mango salsa", "kimchi pancakes", "eggs Benedict", "apricot tart", "baked salmon", "lemon meringue pie",
    "sausage rolls", "barley soup", "chicken tikka masala", "bean salad", "ginger cookies", "flatbread",
    "stuffed zucchini", "plum cake", "crab cakes", "roasted pumpkin seeds", "peanut butter cookies", "borscht",
    "fettuccine Alfredo", "raspberry sorbet", "polenta", "caramel popcorn", "bagels", "chicken satay",
    "cherry clafoutis", "cream of mushroom soup", "focaccia", "vegetable korma", "walnut bread", "tofu scramble",
    "beet salad", "egg fried noodles", "lemonade", "roast beef", "stuffed cabbage", "angel food cake", "couscous salad",
    "tortilla soup", "sweet potato curry", "deviled eggs", "coconut macaroons", "cottage pie", "vegetable samosas",
    "mushroom soup", "date squares", "grilled cheese sandwiches", "chicken soup", "raisin bread", "Irish stew",
    "caprese salad", "orange marmalade", "pierogi", "tomato salad", "honey cake", "panna cotta",
)  # fmt: skip

# All of them ask for the same form, ingredients and then steps: that is what makes the domain narrow. Questions of
# other forms ("How do I make…?") get prose from a small target, and the drafter would need much longer to learn it.
_RECIPE_WORDINGS = (
    "Write a simple recipe for {dish}{limit}.",
    "Write a simple recipe for {dish}{limit}: first the ingredients, then the steps.",
    "I need a simple recipe for {dish}{limit}. List the ingredients and the steps.",
    "Please write an easy recipe for {dish}{limit} with ingredients and steps.",
    "Give me an easy recipe for {dish}{limit}, with a list of ingredients and numbered steps.",
    "Write a recipe for {dish}{limit} that a beginner can follow. List the ingredients first.",
)
_RECIPE_LIMITS = (
    "", " for two people", " for a family of four", " for a party of ten", " on a small budget",
    " with few ingredients", " for a picnic", " for the weekend",
)  # fmt: skip

_TOPICS = (
    "solar panels", "public libraries", "house plants", "volcanoes", "job interviews", "electric cars", "sleep",
    "the water cycle", "stage fright", "chess", "recycling", "jazz music", "high blood pressure", "school uniforms",
    "bees", "credit cards", "the Moon", "remote work", "folk tales", "marathon training", "glaciers", "black holes",
    "public speaking", "bicycles", "vaccines", "origami", "inflation", "rain forests", "learning a language",
    "friendship", "computer viruses", "gardening", "the printing press", "stress", "coral reefs", "photography",
    "time management", "earthquakes", "dogs", "online shopping", "wind power", "poetry", "hiking", "database backups",
    "the human heart", "museums", "migration of birds", "homework", "tea", "bridges", "saving money", "meditation",
    "satellites", "ancient Rome", "team sports", "noise in cities", "fractions", "rivers", "email etiquette", "robots",
    "winter clothing", "lighthouses", "the immune system", "volunteering", "maps", "desert animals", "piano lessons",
    "moving house", "whales", "antibiotics", "small talk", "public transport", "dreams", "knitting", "photosynthesis",
    "renting a flat", "thunderstorms", "theatre", "passwords", "swimming", "soil", "elections", "the Silk Road",
    "habits", "cats", "telescopes", "first aid", "board games", "architecture", "plastic waste", "giving feedback",
    "penguins", "yoga", "steam engines", "news on the internet", "magnets", "camping", "budgets", "mathematics exams",
    "opera", "allergies", "castles", "weather forecasts", "apologies", "ants", "video calls", "island life",
    "the periodic table", "night trains", "second-hand clothes", "long flights", "tides", "wool", "clocks",
    "science fiction", "tree houses", "drinking water", "neighbours", "ice skating", "handwriting",
)  # fmt: skip

_GENERAL_WORDINGS = (
    "Explain {topic} to a ten-year-old.",
    "What should everyone know about {topic}?",
    "Write a short story about {topic}.",
    "Give me five interesting facts about {topic}.",
    "What do people often get wrong about {topic}?",
    "Write a short poem about {topic}.",
    "I have to give a talk about {topic}. Suggest an outline.",
    "Why would somebody want to know more about {topic}?",
    "Write a friendly email to a colleague about {topic}.",
    "What questions would you ask an expert on {topic}?",
    "Describe {topic} in three sentences.",
    "Help me write the first paragraph of an essay on {topic}.",
    "What has changed about {topic} in the last hundred years?",
    "Give me some practical advice that has to do with {topic}.",
    "Make a short quiz about {topic} with answers.",
    "Write a dialogue between two friends who disagree about {topic}.",
)


def recipe_prompts(count: int, split: Split, seed: int = 0) -> list[dict[str, Any]]:
    """Prompts that ask for a cooking recipe.

    Args:
        count: how many; the first n prompts are the same whatever the count.
        split: "train" or "heldout"; no dish, and so no text, occurs in both.
        seed: chooses wording and order. It does not move a dish from one split to the other.

    Returns:
        Records in the messages format, one user turn each, with `domain` "recipes".

    Raises:
        DSparkError: unknown split, or more prompts than there are.
    """
    wordings = [wording.replace("{limit}", limit) for wording in _RECIPE_WORDINGS for limit in _RECIPE_LIMITS]
    return _compose("recipes", _DISHES, "{dish}", wordings, count, split, seed)


def general_prompts(count: int, split: Split, seed: int = 0) -> list[dict[str, Any]]:
    """Everyday questions over many topics; arguments and errors as for `recipe_prompts`, `domain` "general"."""
    return _compose("general", _TOPICS, "{topic}", list(_GENERAL_WORDINGS), count, split, seed)


def _compose(
    domain: str, subjects: Sequence[str], slot: str, wordings: list[str], count: int, split: Split, seed: int
) -> list[dict[str, Any]]:
    """Round after round, every subject once, each time in a wording that it has not had."""
    if split not in ("train", "heldout"):
        raise DSparkError(f'there is no prompt split {split!r}; choose "train" or "heldout"')
    subjects = [
        subject
        for index, subject in enumerate(subjects)
        if (index % _HELDOUT_EVERY == _HELDOUT_EVERY - 1) == (split == "heldout")
    ]
    available = len(subjects) * len(wordings)
    if not 0 <= count <= available:
        raise DSparkError(
            f"{count} {domain} prompts were asked for, and the {split} set has {available}; ask for fewer"
        )
    # Seeding with a string uses its SHA-512: the same draw on every platform and Python release.
    draw = random.Random(f"{domain}/{split}/{seed}")
    wording_order = {subject: draw.sample(wordings, len(wordings)) for subject in subjects}
    records: list[dict[str, Any]] = []
    for used in range(len(wordings)):
        for subject in draw.sample(subjects, len(subjects)):
            if len(records) == count:
                return records
            text = wording_order[subject][used].replace(slot, subject)
            identifier = f"{domain}-{split}-{seed}-{len(records):05d}"
            records.append({"id": identifier, "messages": [{"role": "user", "content": text}], "domain": domain})
    return records
