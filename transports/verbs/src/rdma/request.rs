//! Request numbers, which completions return.

/// The kind of an operation. It is part of the number that the completion returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum OpKind {
    Put = 1,
    Get = 2,
    AddFlag = 3,
    Wake = 4,
    Quiet = 5,
    Receive = 6,
    Answer = 7,
}

impl OpKind {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Put => "put",
            Self::Get => "get",
            Self::AddFlag => "add_flag",
            Self::Wake => "wake",
            Self::Quiet => "quiet",
            Self::Receive => "receive",
            Self::Answer => "answer",
        }
    }

    const fn from_bits(bits: u64) -> Self {
        match bits {
            1 => Self::Put,
            2 => Self::Get,
            3 => Self::AddFlag,
            4 => Self::Wake,
            5 => Self::Quiet,
            7 => Self::Answer,
            _ => Self::Receive,
        }
    }
}

/// Number of a request: the queue pair, the kind, and the low half of its place in the queue.
///
/// ```text
/// 63 place in the table 44 | 43 generation 36 | 35 kind 32 | 31 sequence 0
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RequestId(pub(super) u64);

impl RequestId {
    pub(super) const fn new(place: Place, kind: OpKind, sequence: u64) -> Self {
        Self(
            (place.idx as u64) << 44
                | (place.generation as u64) << 36
                | (kind as u64) << 32
                | (sequence & 0xffff_ffff),
        )
    }

    pub(super) const fn place(self) -> Place {
        Place { idx: (self.0 >> 44) as u32, generation: (self.0 >> 36) as u8 }
    }

    pub(super) const fn kind(self) -> OpKind {
        OpKind::from_bits(self.0 >> 32 & 0xf)
    }
}

/// Place of a queue pair in the driver's table. The generation distinguishes its successive users.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) idx: u32,
    pub(super) generation: u8,
}

/// The number of queue pairs that request numbers can distinguish.
pub(super) const MAX_QUEUE_PAIRS_IN_ALL: usize = 1 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_numbers_carry_all_their_parts() {
        for kind in [
            OpKind::Put,
            OpKind::Get,
            OpKind::AddFlag,
            OpKind::Wake,
            OpKind::Quiet,
            OpKind::Receive,
            OpKind::Answer,
        ] {
            for (idx, generation, sequence) in [
                (0, 0, 0u64),
                (MAX_QUEUE_PAIRS_IN_ALL as u32 - 1, 255, u64::MAX),
                (77, 3, 1 << 40 | 5),
            ] {
                let place = Place { idx, generation };
                let id = RequestId::new(place, kind, sequence);
                assert_eq!((id.place(), id.kind(), id.0 as u32), (place, kind, sequence as u32));
            }
        }
    }
}
