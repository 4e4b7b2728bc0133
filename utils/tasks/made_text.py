"""Text composed by rule, so that everything here runs offline: posts with summaries, guessing games, small programs.

Each function yields dicts and is a pure function of (size, seed). `posts` is the data of the default task; the three
together are what the embedded model was trained on (see make_tiny_lm.py).
"""

import random

PEOPLE = {
    "he": ["roommate Tom", "brother Sam", "boss Mark", "friend Leo", "cousin Ben", "neighbour Paul", "uncle Max"],
    "she": ["roommate Anna", "sister Mia", "boss Julia", "friend Kate", "cousin Lena", "neighbour Rosa", "aunt Emma"],
}
SLOTS = {
    "place": ["river", "station", "park", "market", "school", "harbour", "library", "old mill"],
    "time": ["Last week", "Yesterday", "On Monday", "Last month", "Two days ago", "In the summer"],
    "thing": ["bike", "laptop", "camera", "guitar", "car", "phone", "tent", "coat"],
    "pet": ["dog", "cat", "parrot", "puppy"],
    "money": ["fifty", "eighty", "two hundred", "three hundred"],
    "city": ["Rome", "Paris", "Oslo", "Lisbon", "Berlin"],
    "mood": ["angry", "sad", "tired", "hurt", "worried", "confused"],
}
# A fact is (sentences a post may use, sentences a summary may use). Every story: who, three facts of its own, end.
WHO = (
    ["My {who} and I live near the {place}.", "I have known my {who} for years, and we live near the {place}."],
    ["I live near the {place} with my {who}.", "My {who} lives with me near the {place}.", "This is about my {who}."],
)
STORIES = [
    [
        (
            ["{time} {she} took my {thing} without asking me."],
            ["{name} took my {thing} without asking.", "{time} {name} took my {thing} and did not ask me."],
        ),
        (
            ["When {she} gave it back, the {thing} was broken and dirty."],
            ["The {thing} came back broken.", "{She} gave the {thing} back broken and dirty."],
        ),
        (
            ["I asked {her} to pay for it, but {she} only laughed."],
            ["{name} will not pay for it.", "I want {name} to pay for the {thing}, but {she} only laughed."],
        ),
    ],
    [
        (
            ["{time} {she} brought home a {pet} without telling me."],
            ["{name} has a new {pet}.", "{time} {name} brought home a {pet} without telling me."],
        ),
        (
            ["The {pet} is loud all night and ruined my {thing}."],
            ["The {pet} ruined my {thing}.", "The {pet} is loud and I can not sleep."],
        ),
        (
            ["I said the {pet} has to go, but {she} started to cry."],
            ["I want the {pet} to go.", "I told {name} that the {pet} has to go and {she} started to cry."],
        ),
    ],
    [
        (
            ["{time} I lent {her} {money} dollars for a new {thing}."],
            ["I lent {name} {money} dollars.", "{name} got {money} dollars from me for a {thing}."],
        ),
        (
            ["{She} said I would get it back soon, but nothing came."],
            ["I did not get the money back.", "{name} said I would get it soon, but nothing came."],
        ),
        (
            ["Now {she} wants to spend the money on a trip to {city}."],
            ["{name} wants to go to {city}.", "Now {name} wants to spend my money on a trip to {city}."],
        ),
    ],
    [
        (
            ["{time} we planned a trip to {city} for my birthday."],
            ["We planned a trip to {city}.", "{name} and I planned a trip to {city} for my birthday."],
        ),
        (
            ["One day before the trip {she} told me {she} would not come."],
            ["{name} will not come.", "{name} told me one day before that {she} would not come."],
        ),
        (
            ["I lost {money} dollars and had to go there alone."],
            ["I lost {money} dollars.", "I had to go to {city} alone and lost {money} dollars."],
        ),
    ],
    [
        (
            ["{time} {she} forgot to meet me at the {place}."],
            ["{name} forgot to meet me.", "{name} forgot that we wanted to meet at the {place}."],
        ),
        (
            ["I waited there for three hours in the cold rain."],
            ["I waited in the rain.", "I waited for {name} three hours in the cold rain."],
        ),
        (
            ["Later {she} said {she} was busy with {her_own} new {thing}."],
            ["{name} was busy with a {thing}.", "{name} said that {she} was busy with {her_own} new {thing}."],
        ),
    ],
]
END = (
    ["I feel {mood} and do not know what to do. Should I talk to {her}?", "I am {mood} about it. Should I move out?"],
    [
        "I feel {mood}.",
        "I am {mood} and want to move out.",
        "Should I talk to {name} about it?",
        "I do not know what to do.",
    ],
)
LINKS = [  # how a summary may go on from the fact before; one row per fact
    [""],
    ["", "", "In short, "],
    ["", "", "Then ", "However, ", "After that "],
    ["", "", "Still, ", "So ", "In fact "],
    ["", "", "So ", "As a result, ", "In the end "],
]


def story(rng):
    """One post, and a summary of one to five of its facts; nothing in the post tells how many."""
    she = rng.choice(list(PEOPLE))
    who = rng.choice(PEOPLE[she])
    fill = {slot: rng.choice(words) for slot, words in SLOTS.items()}
    fill |= {"she": she, "She": she.capitalize(), "who": who, "name": who.split()[-1]}
    fill |= {"her": {"he": "him", "she": "her"}[she], "her_own": {"he": "his", "she": "her"}[she]}
    facts = [WHO, *rng.choice(STORIES), END]
    post = " ".join(rng.choice(sentences) for sentences, _ in facts).format(**fill)
    kept = sorted(rng.sample(range(5), rng.choices(range(1, 6), weights=[5, 4, 4, 3, 2])[0]))
    sentences = [rng.choice(facts[k][1]).format(**fill) for k in kept]
    summary = ""
    for k, sentence in zip(kept, sentences):
        link = rng.choice(LINKS[k]) if summary else ""
        keeps_capital = not link or sentence.startswith((fill["name"], "I ", "On "))
        summary += " " * bool(summary) + link + (sentence if keeps_capital else sentence[0].lower() + sentence[1:])
    return {"prompt": post, "completion": summary}


def posts(size, seed):
    """`size` dicts of a post, the `prompt`, and one summary, the `completion`; the same for the same seed."""
    rng = random.Random(f"posts {seed}")
    return [story(rng) for _ in range(size)]


def games(size, seed):
    """`size` chats about numbers with legal moves, not clever ones: guess a number, or two players add up to one.

    Returns dicts of `messages`, alternately from the user and the assistant.
    """
    rng = random.Random(f"games {seed}")
    return [{"messages": rng.choice([guessing, adding])(rng)} for _ in range(size)]


def guessing(rng):
    high = rng.choice([10, 20, 50, 100])
    low, secret = 1, rng.randint(1, high)
    asks = f"I think of a number from 1 to {high}. Guess it."
    messages = []
    for _ in range(rng.randint(1, 6)):
        guess = rng.randint(low, high)
        messages += [{"role": "user", "content": asks}, {"role": "assistant", "content": str(guess)}]
        if guess == secret:
            break
        low, high = (guess + 1, high) if guess < secret else (low, guess - 1)
        asks = "higher" if guess < secret else "lower"
    return messages


def adding(rng):
    low, high = 0, rng.choice([10, 20, 50])
    asks = f"We each say a number from 0 to {high}. Together they should meet a hidden number. Say yours."
    messages = []
    for _ in range(rng.randint(1, 4)):
        number = rng.randint(low, high)
        messages += [{"role": "user", "content": asks}, {"role": "assistant", "content": str(number)}]
        asks = rng.choice(["higher", "lower"])
        low, high = (number, high) if asks == "higher" else (low, number)
    return messages


INNER = {
    "sum": "a + b",
    "difference": "a - b",
    "product": "a * b",
    "larger": "max(a, b)",
    "smaller": "min(a, b)",
    "remainder": "a % b",
}
OUTER = {
    "double": "2 * {x}",
    "square": "{x} * {x}",
    "negative": "-{x}",
    "half": "{x} // 2",
    "absolute": "abs({x})",
    "next": "{x} + 1",
    "parity": "{x} % 2",
    "text": "str({x})",
}


def programs(size, seed):
    """`size` small programming tasks: a helper `aux` (right three times in four), or the main function that may use it.

    Returns dicts of a `prompt` and a `solution` (strings).
    """
    rng = random.Random(f"programs {seed}")
    tasks = []
    for _ in range(size):
        outer, inner = rng.choice(list(OUTER)), rng.choice(list(INNER))
        name = f"{outer}_of_{inner}"
        head = f'def {name}(a, b):\n    """Return the {outer} of the {inner} of a and b."""'
        if rng.random() < 0.5:
            if rng.random() < 0.25:
                inner = rng.choice(list(INNER))
            prompt = f"{head}\n\nWrite a helper named aux for this function."
            solution = f"def aux(a, b):\n    return {INNER[inner]}"
        else:
            prompt = f"{head}\n\nWrite this function. You may call aux(a, b)."
            x = rng.choice(["aux(a, b)", "aux(a, b)", "x", f"({INNER[inner]})"])
            assign = f"    x = aux(a, b)\n{' ' * 4}" if x == "x" else "    "
            solution = f"def {name}(a, b):\n{assign}return {OUTER[outer].format(x=x)}"
        tasks.append({"prompt": prompt, "solution": solution})
    return tasks
