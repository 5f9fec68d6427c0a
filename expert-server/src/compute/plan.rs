//! How a batch is cut into tiles: short pieces of work that threads take in order of a ticket.
//!
//! A batch runs in rounds of at most a bounded number of entries, each in two phases: *gate/up*
//! fills the intermediate activations `h [entries, inter]`, then *down* turns them into output.
//! A tile of the first phase is a run of intermediate rows of one expert; a tile of the second is
//! a run of hidden columns of the output, over all experts of the round in order, so that no two
//! threads ever add to the same value. The cut depends on the batch and the weights alone.

use super::batch::LayerBatch;
use super::weights::LayerExperts;

/// Entries of one expert, within one round.
#[derive(Clone, Copy, Debug)]
pub(super) struct Segment {
    pub(super) expert: u32,
    /// Entries `begin..end` of the batch.
    pub(super) begin: usize,
    pub(super) end: usize,
    /// Row of the first entry in the intermediate activations.
    pub(super) h_row: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PhaseKind {
    GateUp,
    Down,
}

/// Tiles that may run at the same time, once all tiles of earlier phases are done.
#[derive(Clone, Copy, Debug)]
pub(super) struct Phase {
    pub(super) kind: PhaseKind,
    /// Tickets `first_tile..first_tile + num_tiles`.
    pub(super) first_tile: usize,
    pub(super) num_tiles: usize,
    /// Segments of the round.
    pub(super) first_segment: usize,
    pub(super) num_segments: usize,
}

/// The cut of one batch; its buffers are reused for the next.
#[derive(Debug, Default)]
pub(super) struct Plan {
    pub(super) segments: Vec<Segment>,
    pub(super) phases: Vec<Phase>,
    pub(super) num_tiles: usize,
    /// Intermediate rows per tile of the first phase.
    pub(super) gate_up_rows: usize,
    /// Output columns per tile of the second phase.
    pub(super) down_rows: usize,
    /// Most entries in a round.
    pub(super) max_h_rows: usize,
}

impl Plan {
    /// Cuts a validated batch.
    pub(super) fn build(&mut self, experts: &LayerExperts, batch: &LayerBatch<'_>) {
        let (hidden, inter) = (experts.hidden(), experts.inter());
        self.segments.clear();
        self.phases.clear();
        self.num_tiles = 0;
        self.max_h_rows = 0;
        self.gate_up_rows = tile_rows(hidden, inter);
        self.down_rows = tile_rows(inter, hidden).min(MAX_DOWN_ROWS);
        let capacity = (MAX_H_BYTES / (inter * size_of::<f32>())).max(MIN_H_ROWS);
        let mut first_segment = 0;
        let mut h_row = 0;
        for group in batch.groups {
            let (mut begin, end) = (group.begin as usize, group.end as usize);
            while begin < end {
                if h_row == capacity {
                    self.close_round(hidden, inter, first_segment);
                    first_segment = self.segments.len();
                    h_row = 0;
                }
                let num = (end - begin).min(capacity - h_row);
                self.segments.push(Segment {
                    expert: group.expert,
                    begin,
                    end: begin + num,
                    h_row,
                });
                begin += num;
                h_row += num;
                self.max_h_rows = self.max_h_rows.max(h_row);
            }
        }
        if first_segment < self.segments.len() {
            self.close_round(hidden, inter, first_segment);
        }
    }

    /// Tiles of the first phase per segment.
    pub(super) fn gate_up_tiles(&self, inter: usize) -> usize {
        inter.div_ceil(self.gate_up_rows)
    }

    fn close_round(&mut self, hidden: usize, inter: usize, first_segment: usize) {
        let num_segments = self.segments.len() - first_segment;
        for (kind, num_tiles) in [
            (PhaseKind::GateUp, num_segments * self.gate_up_tiles(inter)),
            (PhaseKind::Down, hidden.div_ceil(self.down_rows)),
        ] {
            self.phases.push(Phase {
                kind,
                first_tile: self.num_tiles,
                num_tiles,
                first_segment,
                num_segments,
            });
            self.num_tiles += num_tiles;
        }
    }
}

/// Rows of `cols` values per tile, out of `rows`: few enough for a tile to stay in the second
/// level cache while several tokens pass over it, and for all threads to get some; a multiple of
/// the rows that kernels handle together.
fn tile_rows(cols: usize, rows: usize) -> usize {
    let fit = TILE_VALUES / cols / ROW_STEP * ROW_STEP;
    fit.clamp(ROW_STEP, rows.div_ceil(MIN_TILES).next_multiple_of(ROW_STEP).max(ROW_STEP))
}

/// Weights per tile: 128 KiB of bf16.
const TILE_VALUES: usize = 64 << 10;
const ROW_STEP: usize = 4;
/// Tiles that a matrix is cut into where it has the rows: enough for the threads of one socket.
const MIN_TILES: usize = 24;
/// Columns of the output per tile at most: all experts of a round contribute to one tile.
const MAX_DOWN_ROWS: usize = 32;
/// Bound on the memory for intermediate activations.
const MAX_H_BYTES: usize = 64 << 20;
/// Rows in a round at least, whatever their size.
const MIN_H_ROWS: usize = 64;
