import matplotlib.pyplot as plt

figure, axes = plt.subplots(figsize=(10, 5))
for continent, _ in continents.most_common():
    here = [place for zone, place in places.items() if zone.startswith(continent + "/")]
    axes.scatter([each[1] for each in here], [each[0] for each in here], s=12, label=continent)
axes.set(xlabel="longitude", ylabel="latitude", title="Time zones, by where they are named for")
axes.legend(fontsize="small")
figure.savefig("zones.png", dpi=100)
plt.close(figure)
