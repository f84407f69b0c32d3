"""A trained model in use, by itself: what a run has recorded is enough, its dataset is not read.

From what is called to what it calls:

    load                a run's folder -> the model
    preprocess          images, rows and texts as its dataset gave them to it
"""
