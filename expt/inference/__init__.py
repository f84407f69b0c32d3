"""A trained model in use, by itself: what a run has recorded is enough; its dataset is read only
where it is asked for.

From what is called to what it calls:

    export              a run's folder -> a file for other programs, checked on `samples`
    plan                what is asked of a run's model, checked without torch, as all that it calls:
      sources             the files that a person has, of the kind that the run was trained on
      table_rows, arrays  what is in those that hold many samples
    predict             a plan -> what the model says of each sample, a batch at a time
      split, reading      a part of the run's dataset, or files, as the model takes them
      answers             from a task's predictions to classes, labels, numbers and masks, by name
    writing             predictions into a file, and mask_pictures into a folder
    load                a run's folder -> the model
    prepared            the model with its normalisation before it
    preprocess          images, rows and texts as its dataset gave them to it
"""
