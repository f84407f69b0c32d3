"""A trained model in use, by itself: what a run has recorded is enough; its dataset is read for checks alone.

From what is called to what it calls:

    export              a run's folder -> a file for other programs, checked on `samples`
    load                a run's folder -> the model
    prepared            the model with its normalisation before it
    preprocess          images, rows and texts as its dataset gave them to it
"""
