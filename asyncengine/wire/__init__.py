"""Every Struct that crosses a process border, by the pipe that carries it.

Frames are columnar: one Struct per step or batch whose `bytes` fields are little-endian arrays (`int32`, `uint64`,
`uint8`) of one length, so that encoding costs the same at any batch size. All Structs are frozen, array-like and
untracked by the garbage collector; each pipe has one `Decoder` over the union of what it may carry.

requests
    engine -> tokenizer      EncodeText | EncodeIds | EncodeChat | Abort | TokenizeText | TokenizeChat | Detokenize
                             | Relink
    tokenizer -> gpu_runner  Generate | Abort | Relink                     ("requests")
    engine, detokenizer -> gpu_runner  Abort | ReleaseSession | StopHit    ("control")
frames
    gpu_runner -> detokenizer          StepFrame | Relink
answers
    detokenizer -> engine              Deltas
    tokenizer -> engine                Encoded | Failed | Tokenized | Detokenized
    engine -> engine                   Cancel | Cancelled                 (between API workers)
    gpu_runner -> engine               Failed
    supervisor -> engine               EngineStatus                       (where API workers are processes of their own)
grammar_messages
    gpu_runner -> grammar process      CheckGrammar | OpenMatch | AdvanceMatches
    grammar process -> gpu_runner      GrammarReady | GrammarChecked | MasksReady | MatchFailed   ("grammar")
reports
    every sidecar -> supervisor        Progress | Ready | Heartbeat | Fatal
"""
