"""The words that the bundled model knows, and what it has to say about each of them."""

from collections.abc import Sequence

from tools.bundled_model.rules import Word

# singular | plural | what it is | where it lives | what it eats
_ANIMALS = """
fox | foxes | a wild animal with red fur and a bushy tail | in a den | mice and berries
hare | hares | a fast animal with long ears and strong legs | in the open fields | grass and clover
rabbit | rabbits | a soft animal with long ears | in a burrow | grass and carrots
owl | owls | a bird with big eyes that flies at night | in a hollow tree | mice and beetles
bear | bears | a big animal with thick brown fur | in the woods | honey and fish
wolf | wolves | a wild animal that hunts in a pack | in deep forests | deer and hares
cat | cats | a small animal with soft fur and sharp claws | in a house with people | fish and mice
dog | dogs | a loyal animal that barks at strangers | in a house with people | meat and bones
mouse | mice | a tiny animal with a long tail | in a small hole | seeds and cheese
hedgehog | hedgehogs | a small animal that is covered with spines | under a hedge | worms and beetles
squirrel | squirrels | a quick animal that climbs trees | in a nest of leaves | nuts and acorns
badger | badgers | a night animal with a black and white face | under the ground | worms and roots
otter | otters | a playful animal that swims and dives | at the water's edge | fish and crabs
beaver | beavers | an animal with strong teeth that builds dams | in a lodge of sticks | bark and leaves
deer | deer | a shy animal with long legs | in the woods | leaves and grass
goat | goats | an animal with horns that climbs very well | on rocky hills | grass and herbs
sheep | sheep | a farm animal with a coat of wool | on a farm | grass and hay
horse | horses | a large animal that people ride | in a stable | hay and oats
donkey | donkeys | an animal with long ears that carries heavy loads | in a stable | hay and grass
cow | cows | a large farm animal that gives milk | on a farm | grass and hay
pig | pigs | a round farm animal with a flat nose | in a sty | roots and apples
hen | hens | a bird that lays eggs | in a henhouse | seeds and worms
duck | ducks | a bird that swims and says quack | among the reeds | water plants and snails
goose | geese | a large bird with a long neck | on a farm | grass and grain
swan | swans | a large white bird with a long neck | on quiet water | water plants
crow | crows | a clever black bird | in tall trees | seeds and insects
sparrow | sparrows | a small brown bird | under the roofs of houses | seeds and crumbs
robin | robins | a small bird with a red breast | in gardens | worms and berries
frog | frogs | a small green animal that jumps | in wet places | flies and worms
turtle | turtles | a slow animal with a hard shell | near warm water | leaves and fruit
snail | snails | a very slow animal that carries its house | in damp gardens | leaves
bee | bees | a small insect that makes honey | in a hive | nectar
ant | ants | a tiny insect that works hard | in an anthill | seeds and crumbs
mole | moles | a small animal that digs tunnels | under the ground | worms
lion | lions | a big cat with a golden mane | in warm grasslands | meat
tiger | tigers | a big cat with black stripes | in warm forests | meat
elephant | elephants | a huge grey animal with a long trunk | in warm countries | grass and fruit
monkey | monkeys | a clever animal that swings from tree to tree | in warm forests | fruit and nuts
penguin | penguins | a black and white bird that swims but cannot fly | in cold countries | fish
parrot | parrots | a colourful bird that can learn to speak | in warm forests | fruit and nuts
dragon | dragons | a creature of old tales that breathes fire | in a cave full of gold | sheep and cows
"""

# singular | plural | what such a person does | where
_PEOPLE = """
baker | bakers | bakes bread | in a bakery
miller | millers | grinds grain into flour | in a mill
farmer | farmers | grows food and keeps animals | on a farm
gardener | gardeners | looks after plants and flowers | in a garden
sailor | sailors | sails across the sea | on a ship
fisher | fishers | catches fish with a net | on a boat
shepherd | shepherds | looks after sheep | in the hills
painter | painters | paints pictures | in a bright studio
teacher | teachers | teaches children | in a school
doctor | doctors | helps people who are ill | in a hospital
weaver | weavers | makes cloth from thread | at a loom
blacksmith | blacksmiths | makes things from iron | in a forge
clockmaker | clockmakers | builds and mends clocks | in a workshop
cook | cooks | prepares meals | in a kitchen
singer | singers | sings songs for others | on a stage
potter | potters | makes pots from clay | at a wheel
librarian | librarians | looks after books | in a library
carpenter | carpenters | builds things from wood | in a workshop
tailor | tailors | makes and mends clothes | in a small shop
knight | knights | wears armour and serves a queen | in a stone hall
pirate | pirates | robs ships at sea | on a fast ship
wizard | wizards | does magic in old tales | in a tall tower
robot | robots | is a machine that can do work | wherever it is needed
"""

# singular | plural | preposition | what it is | something about it
_PLACES = """
river | rivers | by | a long stretch of water that flows to the sea | Boats travel along it, and fish live in it.
forest | forests | in | a large area full of trees | Many animals make their homes there.
hill | hills | on | a piece of high ground that is smaller than a mountain | You can see far from the top of it.
lake | lakes | by | a large area of water with land all around it | People swim and fish there.
meadow | meadows | in | a field of grass and wild flowers | Bees and butterflies visit it in summer.
mountain | mountains | on | a very high piece of land | Snow often lies on top of it.
beach | beaches | on | a strip of sand beside the sea | Children build castles there.
bridge | bridges | on | a way across water or a road | People cross it to reach the other side.
village | villages | in | a small group of houses in the country | Most people there know each other.
garden | gardens | in | a place where people grow flowers and vegetables | It needs sun and water.
harbour | harbours | at | a safe place for ships beside the land | Sailors rest there after a long journey.
island | islands | on | a piece of land with water all around it | You need a boat to get there.
mill | mills | at | a building where grain becomes flour | Wind or water turns its wheel.
lighthouse | lighthouses | at | a tall tower with a bright light beside the sea | It shows ships the way at night.
cave | caves | in | a hollow place in rock | It is dark and cool inside.
pond | ponds | by | a small area of still water | Frogs and ducks like to live there.
valley | valleys | in | the low land between hills | Often a stream runs through it.
castle | castles | in | a large old building with thick walls | Kings and queens used to live there.
orchard | orchards | in | a piece of land where fruit trees grow | The apples are ripe in autumn.
market | markets | at | a place where people buy and sell things | It is loud and full of colours.
tower | towers | in | a tall and narrow building | There are many stairs inside it.
desert | deserts | in | a dry place where very little rain falls | It is hot by day and cold at night.
"""

# singular | plural | what it is | what people use it for
_OBJECTS = """
lantern | lanterns | a lamp that you can carry | to see in the dark
key | keys | a small piece of metal | to open locks
coin | coins | a round piece of metal money | to pay for things
bell | bells | a hollow piece of metal that rings | to call each other
ring | rings | a small circle of metal | to decorate their fingers
book | books | a set of pages with words on them | to read and to learn
letter | letters | a message on paper | to send news to each other
map | maps | a drawing of a place | to find the way
feather | feathers | a light thing that covers a bird | to fill soft pillows
button | buttons | a small round thing on clothes | to close coats and shirts
candle | candles | a stick of wax that burns slowly | to make light
cup | cups | a small bowl with a handle | to drink tea
whistle | whistles | a small pipe that makes a high sound | to call dogs
hat | hats | a piece of clothing for the head | to keep their heads warm
scarf | scarves | a long piece of warm cloth | to keep their necks warm
basket | baskets | a container made of thin branches | to carry bread and fruit
clock | clocks | a machine that shows the time | to know what time it is
apple | apples | a round fruit that grows on a tree | to bake pies
umbrella | umbrellas | a round roof of cloth on a stick | to stay dry in the rain
mirror | mirrors | a piece of glass that shows your face | to look at themselves
spoon | spoons | a tool with a small bowl at one end | to eat soup
flute | flutes | a thin pipe that makes music | to play gentle tunes
drum | drums | an instrument that you hit with your hands | to keep the beat
kite | kites | a light toy that flies in the wind | to play on windy days
rope | ropes | a very thick and strong string | to tie things together
shell | shells | the hard house of a sea animal | to remember the beach
acorn | acorns | the seed of an oak tree | to grow new oak trees
ball | balls | a round toy that bounces | to play games
brush | brushes | a tool with many hairs | to paint and to clean
boot | boots | a strong shoe that covers the ankle | to keep their feet dry
compass | compasses | a tool with a needle that points north | to find the way
bottle | bottles | a glass container with a narrow neck | to keep water and milk
"""

# noun | adjective | what happens | what it is | something about it
_WEATHER = """
rain | rainy | rain was falling | water that falls from the clouds in drops | It makes the plants grow.
snow | snowy | snow was falling | soft white ice that falls from the clouds | Children make balls and figures out of it.
wind | windy | a strong wind was blowing | air that moves across the land | It turns mills and carries kites.
fog | foggy | thick fog lay on the fields | a cloud that lies close to the ground | It is hard to see far in it.
sunshine | sunny | the sun was shining | the light and warmth of the sun | It makes people and cats happy.
storm | stormy | a storm was coming | strong wind with rain and thunder | It is best to stay inside until it is over.
frost | frosty | frost covered the grass | a thin layer of ice on cold mornings | It makes the grass shine.
"""

# term | with article | plural | what it is | something about it
_TERMS = """
Penstock | Penstock | Penstock | Penstock is an engine that serves language models. \
| A request flows through small services, and any of them may die without breaking a stream.
Redis | Redis | Redis | Redis is a fast store that keeps data in memory. \
| Penstock uses its streams to carry work from one service to the next.
block table | a block table | block tables | A block table lists the memory blocks that belong to one request. \
| With it, the worker finds the keys and values of earlier tokens.
scheduler | a scheduler | schedulers | A scheduler decides which requests run in the next step. \
| It also hands out the memory blocks and takes them back.
worker | a worker | workers | A worker is the service that runs the model. \
| It reads a plan from the scheduler and sends back the new tokens.
gateway | a gateway | gateways | A gateway is the door of the engine. \
| It takes requests from the network and streams the answers back.
tokenizer | a tokenizer | tokenizers | A tokenizer turns text into numbers that a model can read. \
| It cuts rare words into smaller pieces.
detokenizer | a detokenizer | detokenizers | A detokenizer turns the numbers from the model back into text. \
| It waits until a letter is complete before it sends it on.
token | a token | tokens | A token is a piece of text, often a word or a part of one. \
| A model reads and writes one token after another.
batch | a batch | batches | A batch is a group of requests that run together. \
| Large batches keep the hardware busy.
stream | a stream | streams | A stream is a list that grows at one end while others read it. \
| Penstock sends its messages through streams.
prefill | prefill | prefill | Prefill is the step in which a model reads the whole prompt. \
| After it, the first new token appears.
decode | decode | decode | Decode is the step in which a model writes one new token. \
| It is repeated until the answer is complete.
prompt | a prompt | prompts | A prompt is the text that you give to a model. | The model continues it with an answer.
cache | a cache | caches | A cache keeps results so that nobody has to compute them again. \
| The keys and values of old tokens are kept in one.
sampler | a sampler | samplers | A sampler picks the next token from what the model offers. \
| With a temperature of zero it always takes the best one.
language model | a language model | language models | A language model guesses which word comes next. \
| I am a very small one.
"""

_NAMES_HE = "Pip Tom Otto Finn Hugo Emil Bruno Leo Max Karl Nils Sam Otis Rufus Arlo Felix Ivo Jonas"
_NAMES_SHE = "Mina Ada Lena Rosa Ella Nora Ida Tilda Wilma Clara Greta Hana Lily Maya Olga Vera Zoe Ruby"
_TRAITS = "brave kind curious quiet clever patient cheerful shy sleepy gentle proud lonely young old hungry careful"
_TIMES = "morning afternoon evening day"
_SPOTS = (
    "under a stone",
    "behind a tree",
    "in the tall grass",
    "between two roots",
    "beside an old wall",
    "under a pile of leaves",
    "next to a fallen branch",
    "inside a hollow log",
    "at the edge of the path",
    "behind a bush",
    "in a small hole",
    "near an old gate",
)


def with_article(noun: str) -> str:
    """The noun with "a" or "an"; no word of the lexicon is an exception to the rule of the first letter."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def capitalised(text: str) -> str:
    """The text with a capital first letter, the rest as it is."""
    return text[:1].upper() + text[1:]


def _rows(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")] for line in table.strip().splitlines()]


def _noun(key: str, plural: str, *, a: str | None = None, **more: str) -> Word:
    article = with_article(key) if a is None else a
    the = f"the {key}"
    forms = {"": key, "plural": plural, "a": article, "the": the, "title": key.title(), **more}
    forms |= {"A": capitalised(article), "The": capitalised(the), "Plural": capitalised(plural)}
    return Word(key, forms)


def _animal(key: str, plural: str, what: str, home: str, food: str) -> Word:
    definition = f"{capitalised(with_article(key))} is {what}."
    return _noun(key, plural, what=what, home=home, food=food, definition=definition, fact=f"It lives {home}.",
                 other=f"It eats {food}.")  # fmt: skip


def _person(key: str, plural: str, work: str, workplace: str) -> Word:
    what = work.removeprefix("is ") if work.startswith("is ") else f"a person who {work}"
    definition = f"{capitalised(with_article(key))} is {what}."
    fact = f"{capitalised(with_article(key))} works {workplace}."
    return _noun(key, plural, what=what, work=work, workplace=workplace, definition=definition, fact=fact)


def _place(key: str, plural: str, preposition: str, what: str, fact: str) -> Word:
    definition = f"{capitalised(with_article(key))} is {what}."
    return _noun(key, plural, what=what, at=f"{preposition} the {key}", definition=definition, fact=fact)


def _object(key: str, plural: str, what: str, use: str) -> Word:
    definition = f"{capitalised(with_article(key))} is {what}."
    return _noun(key, plural, what=what, use=use, definition=definition, fact=f"People use it {use}.")


def _weather(key: str, adjective: str, happening: str, what: str, fact: str) -> Word:
    # "Storm" alone takes an article; the others cannot be counted.
    article = "a storm" if key == "storm" else key
    plural = "storms" if key == "storm" else key
    more = {"adj": adjective, "a_adj": with_article(adjective), "happening": happening}
    definition = f"{capitalised(article)} is {what}."
    return _noun(key, plural, a=article, what=what, definition=definition, fact=fact, **more)


def _name(key: str, he: str, his: str, him: str) -> Word:
    return Word(key, {"": key, "he": he, "He": he.title(), "his": his, "His": his.title(), "him": him})


def _plain(keys: Sequence[str]) -> list[Word]:
    return [Word(key, {"": key, "a": with_article(key)}) for key in keys]


ANIMALS = [_animal(*row) for row in _rows(_ANIMALS)]
PEOPLE = [_person(*row) for row in _rows(_PEOPLE)]
PLACES = [_place(*row) for row in _rows(_PLACES)]
OBJECTS = [_object(*row) for row in _rows(_OBJECTS)]
WEATHER = [_weather(*row) for row in _rows(_WEATHER)]
TERMS = [_noun(key, plural, a=a, definition=what, fact=fact) for key, a, plural, what, fact in _rows(_TERMS)]
CHARACTERS = [*ANIMALS, *PEOPLE]
STORY_WORDS = [*CHARACTERS, *PLACES, *OBJECTS, *WEATHER]
"""Everything a story can be about."""
NAMES = [
    *(_name(name, "he", "his", "him") for name in _NAMES_HE.split()),
    *(_name(name, "she", "her", "her") for name in _NAMES_SHE.split()),
]
TRAITS = _plain(_TRAITS.split())
TIMES = _plain(_TIMES.split())
SPOTS = _plain(_SPOTS)
