"""The prompts that `adaptree check lossless` uses unless it is given others: short and long, code, lists, stories,
sums, other languages, and texts that repeat themselves.
"""

_ARTICLE = (
    "The harbour town of Weststrand has decided to keep its ferry. At a meeting that lasted until midnight, the "
    "council voted eleven to four for a plan that replaces the diesel boat of 1974 by an electric one, built at "
    "the yard across the bay. The boat will carry eighteen cars and two hundred passengers, and will need twelve "
    "minutes for a crossing that takes fifteen today. Opponents had argued for a bridge, which would have cost "
    "four times as much and closed the harbour to sailing ships. 'We are a town that looks at the water, not "
    "over it,' said the mayor, who has crossed the bay every working day for thirty years. The yard expects to "
    "hire forty people, among them six apprentices. The old boat will not be scrapped: a school on the island "
    "wants to use it as a gymnasium, provided that the engine is taken out. The first crossing of the new boat "
    "is planned for the spring after next, on the day when the fishing season opens. Until then the old one will "
    "run every hour, and every half hour on market days. "
)

_CODE = """class Inventory:
    def __init__(self):
        self.items = {}

    def add(self, name, count):
        if count <= 0:
            raise ValueError("count must be positive")
        self.items[name] = self.items.get(name, 0) + count

    def remove(self, name, count):
        if self.items.get(name, 0) < count:
            raise KeyError(name)
        self.items[name] -= count
        if self.items[name] == 0:
            del self.items[name]
"""

_TABLE = "\n".join(
    f"{year},{month:02d},{(year * 37 + month * 91) % 500}" for year in (2021, 2022) for month in range(1, 13)
)

LOSSLESS_PROMPTS = (
    "Hi",
    "What is the capital of Portugal?",
    "Write a function in Python that returns the n-th Fibonacci number, with a docstring and three tests.",
    "List ten vegetables, one per line, in alphabetical order.",
    "Tell me a story about a lighthouse keeper who finds a letter in a bottle.",
    "A train leaves at 9:40 and arrives at 13:05. How long does the journey take? Explain step by step.",
    "Erkläre in drei Sätzen, warum der Himmel blau ist.",
    "Écris un court poème sur la pluie en automne.",
    "用三句话介绍一下长城。",
    "Explica qué es un contrato de alquiler y qué cláusulas importantes suele tener.",
    "Repeat after me, exactly and twice: the quick brown fox jumps over the lazy dog, the quick brown fox sleeps.",
    "Count from one to forty in words, separated by commas.",
    "a b c a b c a b c a b d a b c a b c a b c a b d a b c a b c a b c a b",
    f"Summarise the following text in two sentences.\n\n{_ARTICLE}",
    f"Copy the following text word for word, but replace the word 'boat' by 'ship'.\n\n{_ARTICLE}",
    f"Add a method `total` to this class that returns the sum of all counts. Print the whole class.\n\n{_CODE}",
    f"Find the bugs in this code, if there are any, and write tests for it.\n\n{_CODE}{_CODE.replace('Inv', 'D')}",
    f"Here is a table of year, month and visitors. Which month had most visitors in each year?\n\n{_TABLE}",
    "Write a JSON object with the keys name, age, address and hobbies, the address being an object of its own.",
    "Translate into English: Der Zug fährt um sieben Uhr ab, und wer zu spät kommt, muss bis zum Abend warten.",
    "Solve for x: 3x + 7 = 2(x - 4) + 20. Show every step.",
    "Write a polite letter to a neighbour whose dog barks at night. Keep it under a hundred words. 🐕",
    "Compare bicycles, buses and trams as means of transport in a town of 100,000. Use a table in Markdown.",
    f"{_ARTICLE}\n{_ARTICLE}\nWhat did the council decide, what becomes of the old boat, and what did the mayor say?",
)
"""User messages; each becomes a conversation in the model's own chat format."""
