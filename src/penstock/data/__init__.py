"""From files to micro-batches: source, turns, template, store, packing, loader, preview, in that order.

    source    names, files and the Hub      -> rows with file:line        (files.py reads the files)
    turns     rows of any known form        -> turns
    template  turns                         -> text with its trained spans
    store     text                          -> token ids and mask on disk, cached by content
    packing   lengths                       -> rows of examples
    loader    a position (two integers)     -> the micro-batches of a step
    preview   all of it                     -> what `penstock data` shows

Nothing is imported here: the command line imports modules of this package before it knows whether it needs torch.
"""
