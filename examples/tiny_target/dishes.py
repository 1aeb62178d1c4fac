"""The facts of the tiny target's kitchen: main ingredients, what is made of them, and styles."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Main:
    """A main ingredient: `amount` for two people, `minutes` to cook it, `prepare` the wordings of step 1."""

    name: str
    plural: str
    amount: str
    minutes: int
    prepare: tuple[str, ...]
    instead: str


@dataclass(frozen=True)
class Form:
    """What is made of it. `{main}` and `{minutes}` are filled in; a number in braces scales with the people."""

    name: str
    ingredients: tuple[str, ...]
    steps: tuple[tuple[str, ...], ...]
    serve: tuple[str, ...]
    keep: str
    base_minutes: int


SAVOURY_MAINS = (
    Main("carrot", "carrots", "{300} g carrots", 18,
         ("Peel the carrots and cut them into thin slices.", "Wash the carrots and grate them coarsely."), "parsnips"),
    Main("spinach", "spinach", "{400} g fresh spinach", 6,
         ("Wash the spinach and remove the thick stems.", "Rinse the spinach well and chop it roughly."), "kale"),
    Main("mushroom", "mushrooms", "{300} g brown mushrooms", 10,
         ("Brush the mushrooms clean and slice them.", "Wipe the mushrooms and cut them into quarters."), "eggplant"),
    Main("pumpkin", "pumpkin", "{500} g pumpkin", 25,
         ("Halve the pumpkin, scrape out the seeds and cut the flesh into cubes.",
          "Peel the pumpkin and cut it into small cubes."), "sweet potatoes"),
    Main("tomato", "tomatoes", "{6} ripe tomatoes", 15,
         ("Cut the tomatoes into small cubes.", "Pour hot water over the tomatoes and peel off the skin."),
         "canned tomatoes"),
    Main("potato", "potatoes", "{500} g potatoes", 22,
         ("Peel the potatoes and cut them into cubes.", "Scrub the potatoes and slice them thinly."), "celery root"),
    Main("leek", "leeks", "{2} large leeks", 12,
         ("Wash the leeks and cut them into rings.", "Halve the leeks, rinse them and slice them finely."), "onions"),
    Main("broccoli", "broccoli", "{400} g broccoli", 9,
         ("Divide the broccoli into small florets.", "Cut the broccoli into florets and peel the stem."),
         "cauliflower"),
    Main("lentil", "lentils", "{200} g red lentils", 20,
         ("Rinse the lentils under cold water.", "Sort the lentils and rinse them in a sieve."), "split peas"),
    Main("chickpea", "chickpeas", "{200} g cooked chickpeas", 14,
         ("Drain the chickpeas and rinse them.", "Drain the chickpeas and pat them dry."), "white beans"),
    Main("bean", "beans", "{200} g kidney beans", 16,
         ("Drain the beans and rinse them.", "Rinse the beans and let them drip dry."), "black lentils"),
    Main("chicken", "chicken", "{300} g chicken breast", 13,
         ("Cut the chicken into strips and salt it lightly.", "Pat the chicken dry and cut it into cubes."), "turkey"),
    Main("beef", "beef", "{400} g lean beef", 40,
         ("Cut the beef into bite-sized pieces and pepper it.", "Slice the beef thinly across the grain."), "lamb"),
    Main("salmon", "salmon", "{300} g salmon fillet", 8,
         ("Remove the skin from the salmon and cut it into cubes.", "Rinse the salmon and pat it dry."), "trout"),
    Main("shrimp", "shrimp", "{200} g peeled shrimp", 5,
         ("Rinse the shrimp and pat them dry.", "Remove the dark vein from the shrimp and rinse them."), "scallops"),
    Main("tofu", "tofu", "{300} g firm tofu", 11,
         ("Press the tofu between two towels and cut it into cubes.", "Crumble the tofu with a fork."), "tempeh"),
)  # fmt: skip
SWEET_MAINS = (
    Main("apple", "apples", "{4} tart apples", 30,
         ("Peel the apples, remove the core and slice them.", "Wash the apples and dice them."), "quinces"),
    Main("pear", "pears", "{4} firm pears", 28,
         ("Peel the pears and cut them into wedges.", "Quarter the pears and remove the core."), "apples"),
    Main("plum", "plums", "{10} ripe plums", 26,
         ("Halve the plums and take out the stones.", "Stone the plums and cut them into quarters."), "apricots"),
    Main("cherry", "cherries", "{200} g sweet cherries", 24,
         ("Wash the cherries and remove the stones.", "Drain the cherries and keep the juice."), "raspberries"),
    Main("blueberry", "blueberries", "{200} g blueberries", 20,
         ("Rinse the blueberries and let them dry.", "Sort the blueberries and toss them in a little flour."),
         "blackberries"),
    Main("peach", "peaches", "{4} soft peaches", 22,
         ("Peel the peaches and slice them.", "Halve the peaches and remove the stones."), "nectarines"),
    Main("banana", "bananas", "{2} very ripe bananas", 32,
         ("Peel the bananas and mash them with a fork.", "Peel the bananas and slice them."), "mangoes"),
    Main("lemon", "lemons", "{2} fresh lemons", 27,
         ("Grate the zest of the lemons and squeeze out the juice.", "Wash the lemons in hot water and slice them."),
         "limes"),
)  # fmt: skip
SAVOURY_FORMS = (
    Form("soup", ("{2} small onions", "{500} ml vegetable stock", "{2} tablespoons butter"),
         (("Melt the butter in a large pot and soften the onions for 5 minutes.",),
          ("Add the {main} and the stock and simmer for {minutes} minutes.",
           "Stir in the {main}, pour in the stock and cook for {minutes} minutes."),
          ("Blend the soup until it is smooth.", "Blend half of the soup and stir it back in.")),
         ("Serve the soup hot with toasted bread.", "Serve in warm bowls with fresh parsley."),
         "The soup keeps for three days in the fridge and freezes well.", 15),
    Form("curry", ("{2} cloves garlic", "{200} ml coconut milk", "{2} tablespoons curry paste", "{150} g rice"),
         (("Boil the rice in salted water and keep it warm.",),
          ("Fry the garlic and the curry paste in a wok for 2 minutes.",
           "Heat the curry paste with the garlic until it smells strong."),
          ("Add the {main} and the coconut milk and simmer for {minutes} minutes.",)),
         ("Serve the curry over the rice with lime.", "Scatter coriander on top and serve with the rice."),
         "The curry keeps for two days; store the rice in a separate box.", 20),
    Form("stew", ("{2} small onions", "{300} ml beef stock", "{2} bay leaves", "{2} tablespoons tomato paste"),
         (("Brown the onions in a heavy pot.", "Fry the onions slowly until they are golden."),
          ("Stir in the tomato paste, then add the {main}, the stock and the bay leaves.",),
          ("Cover the pot and stew gently for {minutes} minutes.",)),
         ("Remove the bay leaves and serve with mashed potatoes.", "Take out the bay leaves and serve with bread."),
         "The stew tastes even better on the second day and keeps for four days.", 30),
    Form("salad", ("{100} g mixed leaves", "{2} tablespoons olive oil", "{2} teaspoons mustard"),
         (("Cook the {main} for {minutes} minutes and let cool.",),
          ("Whisk the olive oil and the mustard into a dressing.",
           "Shake the mustard and the olive oil in a small jar."),
          ("Toss the {main} with the leaves and the dressing.",)),
         ("Serve the salad at once.", "Let it rest for 10 minutes before serving."),
         "Keep the dressing apart and eat the salad within a day.", 10),
    Form("pie", ("{200} g short pastry", "{2} eggs", "{100} ml milk"),
         (("Line a round tin with the pastry.", "Roll out the pastry and press it into a tin."),
          ("Mix the eggs with the milk and fold in the {main}.",),
          ("Fill the tin and bake at 190 degrees for {minutes} minutes plus 10 minutes to brown.",)),
         ("Let the pie cool for 5 minutes before cutting.", "Serve the pie warm with a green salad."),
         "The pie keeps for two days; warm it in the oven, not in the microwave.", 35),
    Form("risotto", ("{160} g risotto rice", "{600} ml hot stock", "{40} g parmesan"),
         (("Toast the rice in a wide pan until it is glassy.",),
          ("Add the stock one ladle at a time and stir until it is absorbed.",
           "Pour in the stock little by little and keep stirring."),
          ("Add the {main} for the last {minutes} minutes and stir in the parmesan.",)),
         ("Serve the risotto at once, while it is creamy.", "Rest the risotto for 2 minutes and serve."),
         "Risotto does not keep well; fry the leftovers as small cakes the next day.", 25),
    Form("stir-fry", ("{2} tablespoons soy sauce", "{2} cm ginger", "{120} g noodles"),
         (("Soak the noodles in boiling water.", "Cook the noodles and rinse them with cold water."),
          ("Heat the wok until it smokes, then fry the ginger and the {main} for {minutes} minutes.",),
          ("Add the noodles and the soy sauce and toss for 1 minute.",)),
         ("Serve straight from the wok.", "Sprinkle with sesame seeds and serve."),
         "Keep the stir-fry for one day and reheat it in a very hot pan.", 12),
    Form("casserole", ("{200} ml cream", "{80} g grated cheese", "{2} cloves garlic"),
         (("Rub a baking dish with the garlic.", "Grease a baking dish and scatter the garlic in it."),
          ("Layer the {main} in the dish and pour the cream over it.",),
          ("Cover with the cheese and bake at 200 degrees for {minutes} minutes plus 15 minutes.",)),
         ("Serve the casserole when the top is golden.", "Let the casserole stand for 10 minutes and serve."),
         "The casserole keeps for three days; cover it well.", 30),
    Form("omelette", ("{4} eggs", "{2} tablespoons milk", "{2} teaspoons butter"),
         (("Fry the {main} in the butter for {minutes} minutes.",),
          ("Beat the eggs with the milk and a pinch of salt.", "Whisk the eggs, the milk and some salt."),
          ("Pour the eggs over the {main} and cook on low heat until set.",)),
         ("Fold the omelette and serve at once.", "Slide the omelette onto a plate and serve with chives."),
         "An omelette is best fresh; eat the rest cold in a sandwich.", 8),
)  # fmt: skip
SWEET_FORMS = (
    Form("cake", ("{150} g flour", "{100} g sugar", "{2} eggs", "{100} g soft butter"),
         (("Beat the butter with the sugar until it is pale.", "Cream the sugar and the butter."),
          ("Stir in the eggs and the flour, then fold in the {main}.",),
          ("Bake at 180 degrees for {minutes} minutes.",)),
         ("Cool the cake on a rack and dust it with sugar.", "Let the cake cool before slicing."),
         "The cake stays moist for three days under a glass cover.", 25),
    Form("crumble", ("{120} g flour", "{80} g cold butter", "{70} g brown sugar"),
         (("Rub the flour, the butter and the sugar into crumbs.",),
          ("Spread the {main} in a dish and cover with the crumbs.",
           "Lay the {main} in a dish and scatter the crumbs on top."),
          ("Bake at 190 degrees for {minutes} minutes.",)),
         ("Serve the crumble warm with vanilla ice cream.", "Serve it hot with custard."),
         "The crumble keeps for two days; crisp it up again in the oven.", 15),
    Form("pancakes", ("{120} g flour", "{200} ml milk", "{2} eggs", "{2} teaspoons baking powder"),
         (("Whisk the flour, the baking powder, the eggs and the milk.",
           "Mix the flour with the baking powder and beat in the eggs and the milk."),
          ("Let the batter rest for 10 minutes and fold in the {main}.",),
          ("Fry small pancakes for 2 minutes on each side.",)),
         ("Stack the pancakes and pour syrup over them.", "Serve the pancakes with honey."),
         "Freeze the pancakes with paper between them and toast them later.", 20),
    Form("tart", ("{180} g sweet pastry", "{150} ml cream", "{2} egg yolks", "{50} g sugar"),
         (("Line a tart tin with the pastry and prick it with a fork.",),
          ("Arrange the {main} on the pastry in circles.", "Spread the {main} evenly over the pastry."),
          ("Mix the cream, the yolks and the sugar, pour it over and bake at 175 degrees for {minutes} minutes.",)),
         ("Serve the tart cold.", "Glaze the tart with warm jam and serve."),
         "The tart is best on the same day; keep the rest in the fridge.", 30),
    Form("muffins", ("{140} g flour", "{90} g sugar", "{2} eggs", "{80} ml oil"),
         (("Stir the oil, the eggs and the sugar together.",),
          ("Fold in the flour and the {main}.", "Add the flour, mix briefly and fold in the {main}."),
          ("Fill the paper cups and bake at 200 degrees for {minutes} minutes.",)),
         ("Cool the muffins in the tin for 5 minutes.", "Take the muffins out of the tin and eat them warm."),
         "The muffins keep for four days in a tin and freeze well.", 15),
)  # fmt: skip

# Style -> its ingredient and its step.
SAVOURY_STYLES = {
    "simple": ("{2} pinches of salt", "Season with salt and pepper."),
    "spicy": ("{2} red chilies", "Chop the chilies and stir them in."),
    "creamy": ("{100} g sour cream", "Stir in the sour cream off the heat."),
    "fresh": ("{2} sprigs of mint", "Tear the mint and sprinkle it on top."),
}
SWEET_STYLES = {
    "simple": ("{2} pinches of salt", "Do not forget the salt, it brings out the sweetness."),
    "nutty": ("{60} g chopped almonds", "Roast the almonds in a dry pan and add them."),
    "spiced": ("{2} teaspoons cinnamon", "Dust everything with the cinnamon."),
}
PEOPLE = {2: "two", 4: "four"}


def dishes() -> list[tuple[Main, Form]]:
    """All dishes: every main ingredient with every form of its kind."""
    savoury = [(main, form) for main in SAVOURY_MAINS for form in SAVOURY_FORMS]
    return savoury + [(main, form) for main in SWEET_MAINS for form in SWEET_FORMS]
