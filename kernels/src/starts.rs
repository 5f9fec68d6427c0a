//! How the kernels of a layer start, and in how many blocks, by the layer's size: one table for services and for the
//! benchmark of the kernels. Mirrors `include/switchyard/starts.h`.

use crate::abi::{FLAG_EARLY, FLAG_PDL};

/// A layer, as far as the choice depends on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerSize {
    /// Tokens of a client, or rows of a server's batch.
    pub num_tokens: u32,
    /// Clients that send at once.
    pub num_clients: u32,
    /// Servers that share the experts.
    pub num_servers: u32,
    /// Each GPU has a client and a server, whose kernels are on one stream.
    pub is_colocated: bool,
    /// The server sorts entries by expert; else it echoes.
    pub makes_lists: bool,
}

/// The choice. Blocks: 0 = the launcher's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Starts {
    /// `SY_START_*`: how many kernels run beside one another.
    pub start: u32,
    /// Blocks of dispatch.
    pub dispatch_blocks: u32,
    /// Blocks of the kernel that answers.
    pub answer_blocks: u32,
    /// Blocks of combine.
    pub combine_blocks: u32,
}

impl LayerSize {
    /// A call of a client of `num_servers` servers, as services make it. The client does not know the others: as many as
    /// there are servers, where that case was measured.
    #[must_use]
    pub const fn of_client(num_tokens: u32, num_servers: u32) -> Self {
        let (num_clients, num_servers) = match num_servers {
            1 => (1, 1),
            2 => (2, 2),
            _ => (1, 3),
        };
        Self { num_tokens, num_clients, num_servers, is_colocated: false, makes_lists: true }
    }

    /// A batch of a server of `num_clients` clients, as services run it.
    #[must_use]
    pub const fn of_server(num_rows: u32, num_clients: u32) -> Self {
        let num_servers = 1;
        Self {
            num_tokens: num_rows,
            num_clients,
            num_servers,
            is_colocated: false,
            makes_lists: true,
        }
    }

    /// The choice for a layer of this size.
    #[must_use]
    pub fn starts(&self) -> Starts {
        let beside = if self.num_tokens > 128 { BLOCKS_BESIDE } else { 0 };
        let answers_few = self.is_colocated
            && !self.makes_lists
            && self.num_tokens > 48
            && self.num_tokens <= 128;
        Starts {
            start: self.start(),
            dispatch_blocks: self.run().map_or(0, |run| self.num_tokens.div_ceil(run)),
            answer_blocks: if answers_few { ANSWERS_BESIDE } else { beside },
            combine_blocks: beside,
        }
    }

    const fn start(&self) -> u32 {
        if !self.is_colocated {
            return if self.makes_lists && self.num_tokens >= 4096 { AFTER } else { EARLY };
        }
        let is_ahead_of_combine_only =
            !self.makes_lists && self.num_tokens > 256 && self.num_tokens <= 2048;
        if is_ahead_of_combine_only { COMBINE_AHEAD } else { ALL_AHEAD }
    }

    /// Tokens that a block of dispatch sends one after the other; `None` where the launcher chooses.
    fn run(&self) -> Option<u32> {
        if !self.makes_lists || self.num_tokens >= RUN_END {
            return None;
        }
        let column = RUN_FROM.iter().rposition(|from| self.num_tokens >= *from)?;
        let is_it =
            |runs: &&Runs| runs.of == (self.num_clients, self.num_servers, self.is_colocated);
        let run = RUNS.iter().find(is_it)?.tokens[column];
        (run != 0).then_some(run)
    }
}

impl Starts {
    /// `FLAG_*` of this start, for every kernel.
    #[must_use]
    pub const fn flags(&self) -> u32 {
        match self.start {
            AFTER => 0,
            DEPENDENT => FLAG_PDL,
            _ => FLAG_PDL | FLAG_EARLY,
        }
    }
}

/// Tokens of a block of dispatch for clients, servers, and whether they share GPUs; by [`RUN_FROM`], 0 where the launcher
/// chooses.
struct Runs {
    of: (u32, u32, bool),
    tokens: [u32; 6],
}

const AFTER: u32 = 0;
const DEPENDENT: u32 = 1;
const EARLY: u32 = 2;
const COMBINE_AHEAD: u32 = 3;
const ALL_AHEAD: u32 = 4;
const RUN_FROM: [u32; 6] = [24, 48, 96, 160, 224, 384];
const RUN_END: u32 = 1024;
const RUNS: [Runs; 6] = [
    Runs { of: (4, 4, true), tokens: [0, 6, 9, 14, 14, 14] },
    Runs { of: (2, 2, true), tokens: [0, 0, 4, 8, 10, 14] },
    Runs { of: (2, 2, false), tokens: [0, 6, 8, 12, 14, 14] },
    Runs { of: (1, 3, false), tokens: [4, 6, 10, 14, 8, 8] },
    Runs { of: (3, 1, false), tokens: [4, 8, 12, 14, 14, 14] },
    Runs { of: (1, 1, false), tokens: [0, 0, 8, 8, 10, 14] },
];
const BLOCKS_BESIDE: u32 = 132;
const ANSWERS_BESIDE: u32 = 64;
/// Rows for which a server records graphs, besides its most.
pub const BUCKETS: [u32; 8] = [8, 32, 64, 128, 256, 512, 2048, 8192];
