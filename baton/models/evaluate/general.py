"""Plain English for models that were trained on more than this project's stories: prose, and questions with one right answer."""

# Question, right answer, three wrong ones
FACTS = (
    "What is the capital of France?|Paris|London|Madrid|Rome",
    "What is the capital of Japan?|Tokyo|Beijing|Seoul|Bangkok",
    "What is the capital of Egypt?|Cairo|Tunis|Nairobi|Lagos",
    "What is the capital of Germany?|Berlin|Vienna|Warsaw|Paris",
    "What is the capital of Italy?|Rome|Athens|Lisbon|Madrid",
    "What is the capital of Russia?|Moscow|Kiev|Warsaw|Prague",
    "What is the capital of the United Kingdom?|London|Dublin|Paris|Boston",
    "On which continent is Brazil?|South America|Africa|Asia|Europe",
    "On which continent is Kenya?|Africa|South America|Asia|Europe",
    "On which continent is China?|Asia|Europe|Africa|North America",
    "Which ocean lies between Europe and North America?|Atlantic|Pacific|Indian|Arctic",
    "Which planet is closest to the Sun?|Mercury|Venus|Mars|Jupiter",
    "Which planet is the largest?|Jupiter|Saturn|Earth|Mars",
    "Which planet is known for its rings?|Saturn|Mars|Venus|Mercury",
    "Which planet is called the red planet?|Mars|Venus|Jupiter|Neptune",
    "What does the Earth move around?|the Sun|the Moon|Mars|Jupiter",
    "What is water made of?|hydrogen and oxygen|carbon and iron|gold and silver|helium and neon",
    "Which gas do people need to breathe?|oxygen|helium|neon|methane",
    "Which gas do plants take from the air?|carbon dioxide|helium|argon|neon",
    "What is frozen water called?|ice|steam|sand|smoke",
    "At what temperature in degrees Celsius does water boil?|100|50|10|500",
    "Which metal is attracted by a magnet?|iron|gold|silver|copper",
    "What is the chemical symbol of gold?|Au|Ag|Fe|Pb",
    "Which organ pumps blood through the body?|heart|liver|lung|stomach",
    "Which organ do people think with?|brain|heart|kidney|skin",
    "What do people see with?|eyes|ears|hands|feet",
    "How many legs does a spider have?|eight|six|four|ten",
    "How many legs does an insect have?|six|eight|four|two",
    "Which animal gives milk?|cow|hen|frog|snake",
    "Which animal barks?|dog|cat|cow|duck",
    "Which animal can fly?|eagle|dog|horse|elephant",
    "Which animal lives in the sea?|whale|lion|camel|goat",
    "Which animal is the tallest?|giraffe|horse|dog|sheep",
    "What do bees make?|honey|milk|silk|wool",
    "What do hens lay?|eggs|apples|stones|leaves",
    "What is bread made from?|flour|sand|iron|wool",
    "What is cheese made from?|milk|wood|sugar|rice",
    "What is wine made from?|grapes|potatoes|wheat|carrots",
    "Which of these is a fruit?|apple|potato|carrot|onion",
    "Which of these is a vegetable?|carrot|apple|banana|cherry",
    "What colour is grass?|green|red|purple|black",
    "What colour is snow?|white|black|green|red",
    "What colour is the sky on a clear day?|blue|green|brown|black",
    "What colour do blue and yellow make together?|green|red|black|white",
    "How many days are in a week?|seven|five|ten|twelve",
    "How many months are in a year?|twelve|ten|seven|thirty",
    "How many minutes are in an hour?|sixty|ten|thirty|ninety",
    "How many sides does a triangle have?|three|four|five|six",
    "Which day comes after Monday?|Tuesday|Sunday|Friday|Saturday",
    "Which month comes after April?|May|March|July|June",
    "Which season comes after winter?|spring|autumn|summer|harvest",
    "What is the opposite of hot?|cold|warm|wet|loud",
    "What is the opposite of big?|small|large|tall|heavy",
    "What is the opposite of early?|late|soon|fast|first",
    "What do you use to cut paper?|scissors|spoon|pillow|brush",
    "What do you use to write on paper?|pencil|hammer|fork|shoe",
    "Where do people borrow books?|library|bakery|harbour|stable",
    "Who treats people who are ill?|doctor|baker|farmer|pilot",
    "Who wrote Romeo and Juliet?|Shakespeare|Newton|Mozart|Columbus",
    "In which language do people say bonjour?|French|German|Russian|Japanese",
)

PROSE = (
    "A bicycle stays upright because its rider keeps steering it under the place where it is about to fall. When the bicycle leans to the"
    " left, the front wheel turns to the left as well, and the wheels move back below the rider. Nobody thinks about this while riding."
    " Children learn it in an afternoon, and engineers argued about the details for more than a hundred years.",
    "To make a simple soup, cut an onion and two carrots into small pieces and let them soften in a little butter. Add a litre of water, a"
    " handful of lentils and some salt, and leave the pot on a low fire for half an hour. Taste it before you serve it. A few drops of"
    " vinegar make it brighter, and yesterday's bread goes well with it.",
    "The tide rises and falls twice a day on most coasts, because the Moon pulls at the oceans and the Earth turns beneath them. In a wide"
    " bay the difference may be a few centimetres. In a narrow one the water has nowhere to go, and it can climb higher than a house."
    " Harbours print a table of the hours, so that ships know when there is enough water under them.",
    "Before there were clocks in every pocket, a town lived by its bells. One bell opened the gates in the morning, another called the"
    " workers back from their meal, and a third told the innkeepers to send their guests home. A stranger could not tell them apart. A"
    " child of the town knew each of them in its sleep.",
    "A program is a list of instructions that a machine follows without understanding them. If one instruction is wrong, the machine"
    " follows it all the same. This is why programmers write tests: small programs that ask a larger one a question whose answer is known."
    " A test that has never failed proves little, so a careful programmer breaks the code once to see whether anybody notices.",
    "Glass is made by melting sand together with soda and lime until the mixture flows like honey. The glassmaker takes a little of it on"
    " the end of a long pipe and blows, and the glass grows into a bubble. It must be turned all the time, or it would sag to one side."
    " Afterwards it cools for many hours, since glass that cools too fast will crack.",
    "When a company sells more than it buys, the difference is its profit, at least on paper. The money may arrive much later. Many firms"
    " have failed although they earned well, because the bills came before the payments did. A good accountant therefore watches two"
    " numbers: what was earned, and what is in the bank today.",
    "Swallows leave in autumn and return in spring, often to the very barn in which they were born. How they find the way is only partly"
    " understood. They see the Sun and the stars, they feel the magnetism of the Earth, and they seem to remember rivers and mountains. The"
    " journey takes about six weeks, and most of the young birds do not survive it.",
    "The doctor asked the old man how long he had been coughing. Since the spring, he said, but it was nothing, his wife had sent him. She"
    " listened to his chest, first in front and then at the back, and told him to breathe in slowly. Then she wrote something down and"
    " smiled. It was a cold that had stayed too long, and he should stop smoking.",
    "Every language has a way of saying that something happened before something else, but not every language has tenses. Some use a small"
    " word, like yesterday. Others leave it to the listener, who usually knows. People who learn a foreign language find this hard to"
    " believe: it seems that a sentence without a tense must be incomplete, until one has spoken without tenses for a month.",
    "Iron rusts when water and air reach it. The rust takes more room than the iron did, so it lifts the paint and opens the way for more"
    " water. Shipyards fight it with zinc. A piece of zinc on the hull dissolves in place of the steel, and it is cheap to replace. As"
    " long as there is zinc left, the ship is safe.",
    "The train was late again. On the platform a woman read the same page for the third time, two boys shared a bag of cherries and threw"
    " the stones between the rails, and a man in a grey coat asked everybody whether this was the right side for the city. When the train"
    " came at last, nobody got off, and the man in the coat stayed where he was.",
    "A seed holds a small plant and enough food for its first days. It can wait for years. What wakes it is not only water: some seeds need"
    " a winter, some need the light of a clearing, and a few need the heat of a fire. In this way they do not all begin at the same time,"
    " and one bad summer cannot destroy them all.",
    "The court decided that the letter was a contract. It named the goods, the price and the day, and the seller had signed it. That he had"
    " meant it as a joke did not matter, because the buyer could not know. What counts, the judge wrote, is not what somebody thinks in"
    " private but what a reasonable person would understand from his words.",
    "Paper came to Europe from China, by way of the Arab world, and it took more than a thousand years to get there. Before that, people"
    " wrote on the skins of sheep, and a large book needed a whole flock. Cheap paper changed what was written down. Merchants kept"
    " accounts, lovers sent letters, and students for the first time made notes that they could throw away.",
    "If you drop a stone and a feather in a room, the stone lands first, because the air holds the feather back. Without air they land"
    " together. An astronaut tried it on the Moon with a hammer and the feather of a falcon, and both touched the dust at the same moment."
    " Galileo had predicted it more than three hundred years before.",
    "My grandmother kept a notebook in which she wrote what every winter had been like: when the frost came, how long the snow stayed,"
    " on which day the starlings were back. She never drew a conclusion from it. After her death a scientist asked us for the book, and he"
    " copied all of it, because nobody else in the valley had written anything down.",
    "A bridge moves. On a hot day the steel grows longer, and at each end there is a gap that closes a little; you can hear the cars cross"
    " it. In a storm the whole deck swings to the side. An engineer does not try to prevent this. What does not move has to be strong, and"
    " what may move has only to be patient.",
    "Chess players once believed that no machine would ever beat the best of them, since a machine could only calculate. It turned out that"
    " calculation was enough. The games did not become less beautiful for it. Young players now study with machines from the beginning,"
    " and they play moves that their teachers would have forbidden.",
    "To find your way in a forest without a map, walk downhill until you meet water and then follow the stream. It joins a larger one, and"
    " sooner or later there is a road or a house. This takes longer than a straight line, but a straight line is what people without a"
    " compass cannot walk: they turn in circles and cross their own tracks.",
    "The museum owns eleven thousand paintings and shows four hundred. The others hang on sliding walls in the cellar, where it is dark and"
    " the air is always the same. Once a year each of them is pulled out and looked at for damage. The woman who does this has seen all of"
    " them many times, and she says that the best ones are not upstairs.",
    "Sleep is not a pause. During the night the brain goes through several stages, again and again, and in some of them it is as busy as by"
    " day. What was learned in the evening is easier to remember in the morning. People who sleep too little for a week make more mistakes,"
    " and the worst of it is that they do not notice.",
    "When the price of coffee rises, some people drink tea. When it falls again, not all of them come back, for they have found that they"
    " like tea. An economist who only counts cups and prices will be surprised. Habits are cheap to keep and dear to change, and the past"
    " is still present in what we buy today.",
    "The first lighthouse keepers carried wood up the stairs and burned it in an open fire. Later they had oil, then gas, then electric"
    " lamps, and in the end a switch that nobody needs to touch. The houses are empty now. On clear nights one can still see the beam turn"
    " over the water, three flashes and a pause, as it is printed on the chart.",
)
