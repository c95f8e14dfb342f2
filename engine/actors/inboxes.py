"""The messages that each actor handles.  ``Stop`` reaches every one of them, and the base class handles it."""

from engine.messages import (
    Abort,
    Admit,
    Deltas,
    Failed,
    FeatureAnswer,
    FeatureRequest,
    Step,
    StepDone,
    Tokenize,
    Tokens,
)
from engine.types.notices import (
    EngineReady,
    EngineRecovering,
    ExecutorsLost,
    ExecutorsReady,
    Profile,
    Reconfigure,
    Stats,
    TokenizersLost,
    TokenizersReady,
)

TokenizerInbox = Tokenize | Abort | Tokens | Failed
FromExecutor = StepDone | FeatureAnswer
SchedulerInbox = Admit | Abort | FromExecutor | ExecutorsReady | ExecutorsLost | Reconfigure
ExecutorInbox = Step | FeatureRequest | Profile
IngressInbox = Deltas | Failed | EngineReady | EngineRecovering | TokenizersReady | TokenizersLost | Stats
