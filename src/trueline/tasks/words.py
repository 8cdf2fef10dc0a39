"""The words that stories are told in."""

from __future__ import annotations

SHE = tuple(
    "Ada Alice Amy Anna Bella Clara Dana Ella Emma Eva Fatima Grace Hana Iris Jane "
    "Julia Kate Lena Lily Lucy Maria Mei Mia Nina Nora Olga Priya Rosa Ruth Sara "
    "Sofia Tara Uma Vera Zoe".split()
)
HE = tuple(
    "Adam Ahmed Alex Ben Carl Chen Dan David Eric Felix George Hugo Ivan Jack James Jonas "
    "Karim Leo Liam Luca Mark Max Noah Omar Oscar Paul Peter Raj Sam Theo Tim Tom Victor Will "
    "Yuri".split()
)

THINGS = tuple(
    "apples badges balls bananas beads books bottles boxes bricks buttons cakes candles cards "
    "carrots chairs coins cookies crayons cups dolls eggs feathers fish flags flowers forks "
    "gems hats keys kites lamps leaves lemons letters marbles muffins mugs nails notebooks "
    "nuts onions oranges paints peaches pears pebbles pencils pens photos pies plants plates "
    "plums postcards potatoes ribbons rings robots rocks roses rulers seeds shells shirts "
    "socks spoons stamps stickers stones sweets tickets tomatoes toys trees".split()
)
"""What is counted, in the plural."""
PRICED = (
    ("apple", "apples"), ("ball", "balls"), ("book", "books"), ("brush", "brushes"),
    ("cake", "cakes"), ("card", "cards"), ("comb", "combs"), ("cup", "cups"), ("doll", "dolls"),
    ("hat", "hats"), ("kite", "kites"), ("lamp", "lamps"), ("map", "maps"), ("mug", "mugs"),
    ("notebook", "notebooks"), ("pen", "pens"), ("pencil", "pencils"), ("pie", "pies"),
    ("plant", "plants"), ("plate", "plates"), ("ring", "rings"), ("rope", "ropes"),
    ("ruler", "rulers"), ("scarf", "scarves"), ("shirt", "shirts"), ("spoon", "spoons"),
    ("ticket", "tickets"), ("toy", "toys"),
)  # fmt: skip
ONE_CONTAINER = {
    "bag": "bags", "basket": "baskets", "box": "boxes", "carton": "cartons", "crate": "crates",
    "drawer": "drawers", "jar": "jars", "pack": "packs", "shelf": "shelves", "tin": "tins",
    "tray": "trays",
}  # fmt: skip
CONTAINERS = tuple(ONE_CONTAINER.values())
PLACES = (
    "at the market", "at home", "at school", "in the garden", "in the park", "on the beach",
    "on the way home", "under the bed", "in the attic", "at the fair", "by the river",
    "behind the house",
)  # fmt: skip
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
NUMBERS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten",
    "eleven", "twelve",
)  # fmt: skip
TIMES = {2: "twice", 3: "three times", 4: "four times", 5: "five times"}
SHARES = {2: "half", 3: "a third", 4: "a quarter"}
CROWDS = (
    *((f"on a {ride}", "people", "get on", "get off")
      for ride in ("bus", "train", "boat", "tram", "ferry")),
    ("in a class", "students", "join", "leave"), ("in a room", "people", "come in", "go out"),
    ("at a party", "guests", "arrive", "go home"), ("in a tree", "birds", "land", "fly away"),
    ("on a pond", "ducks", "arrive", "swim away"), ("in a park", "children", "come", "go home"),
)  # fmt: skip
"""Where, who, how they come and how they go."""
DONE = (
    ("reads", "read", "pages"), ("walks", "walk", "miles"), ("runs", "run", "laps"),
    ("writes", "write", "letters"), ("bakes", "bake", "cookies"), ("paints", "paint", "pictures"),
    ("picks", "pick", "berries"), ("plants", "plant", "seeds"), ("washes", "wash", "cars"),
    ("sells", "sell", "tickets"), ("builds", "build", "kites"), ("catches", "catch", "fish"),
    ("scores", "score", "points"), ("sells", "sell", "apples"), ("eats", "eat", "nuts"),
    ("makes", "make", "toys"), ("learns", "learn", "words"),
)  # fmt: skip
"""Does, do, what."""

GAMES = ("in the first game", "in the second game", "in the third game")
ON_DAYS = tuple(f"on {day}" for day in DAYS)
OCCASIONS = (
    ("in the morning", "in the afternoon", "in the evening"),
    ("yesterday", "today"), ("last week", "this week"),
    ("in the first hour", "in the second hour", "in the third hour", "in the fourth hour"),
    ON_DAYS,
)  # fmt: skip
SORTS = (
    ("animals", ("cows", "sheep", "goats", "pigs", "hens", "horses", "ducks")),
    ("fruits", ("apples", "pears", "plums", "peaches", "lemons", "oranges", "bananas")),
    ("toys", ("dolls", "balls", "kites", "robots", "cars", "trains")),
    ("flowers", ("roses", "tulips", "lilies", "daisies")),
)
WHOLES = (
    ("A book", "pages", "reads"), ("A road", "miles", "walks"), ("A song", "words", "learns"),
    ("A garden", "berries", "picks"), ("A roll", "meters", "uses"), ("A wall", "bricks", "paints"),
)  # fmt: skip
RELATIVES = ("brother", "sister", "mother", "father", "cousin", "uncle", "aunt")

COLOURS = tuple("red blue green yellow white black brown grey orange purple pink silver".split())
LOCKED = tuple("door box safe gate chest locker drawer vault trunk cabinet".split())

LETTERS = ("b", "d", "f", "g", "k", "l", "m", "n", "p", "r", "s", "t", "v", "z", "br", "st", "tr")
VOWELS = ("a", "e", "i", "o", "u", "ai", "oo", "ee")
ENDS = ("", "", "n", "l", "r", "s", "m", "nd", "rt", "x")
"""Of words that nobody has seen before."""
