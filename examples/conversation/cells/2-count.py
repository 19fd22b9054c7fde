from collections import Counter

continents = Counter(row["zone"].partition("/")[0] for row in rows)
continents.most_common(3)
