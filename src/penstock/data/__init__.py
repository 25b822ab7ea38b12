"""From files to micro-batches: source, turns, template, encoding, store, packing, loader, preview, in that order.

    source    names, files and the Hub      -> pieces of rows with file:line   (names.py, files.py, folders.py, hub.py)
    forms     the keys of a row             -> used, refused, or listed
    turns     rows of any known form        -> turns                           (messages.py reads one message)
    template  turns                         -> text with its trained spans     (chat.py, tool_chat.py, render.py)
    encoding  text                          -> token ids and mask              (coding.py, in processes of workers.py)
    store     the same on disk, cached by content
    packing   lengths                       -> rows of examples
    loader    a position (two integers)     -> the micro-batches of a step
    preview   all of it                     -> what `penstock data` shows

Nothing is imported here: the command line imports modules of this package before it knows whether it needs torch.
"""
