//! The division of a batch into tiles: short pieces of work that threads take by a ticket counter.
//!
//! A batch runs in rounds with a bounded number of entries. Each round has two phases: *gate/up* fills the
//! intermediate activations `h [entries, inter]`, then *down* computes the output from them. A tile of the
//! first phase is a run of intermediate rows of one expert. A tile of the second phase is a run of hidden
//! columns of the output, over all experts of the round in order. So no two threads ever add to the same
//! value. The division depends on the batch and the weights alone.

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

/// Tiles that may run at the same time, after all tiles of earlier phases are done.
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

/// The division of one batch. Its buffers are reused for the next.
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
    /// Divides a validated batch.
    pub(super) fn build(&mut self, experts: &LayerExperts, batch: &LayerBatch<'_>) {
        let (hidden, inter) = (experts.hidden(), experts.inter());
        self.segments.clear();
        self.phases.clear();
        self.num_tiles = 0;
        self.max_h_rows = 0;
        self.gate_up_rows = tile_rows(hidden, inter);
        self.down_rows = tile_rows(inter, hidden);
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

/// Rows of `cols` values per tile, out of `rows`: a multiple of the rows that kernels compute together.
///
/// More rows reuse the token rows in the first level cache more often; fewer rows give every thread some
/// tiles. The number of columns matters only for small models, in which a tile must be worth its ticket. With
/// many tokens the kernels compute a block of columns at a time, which stays in the second level cache for
/// any length of the row.
fn tile_rows(cols: usize, rows: usize) -> usize {
    let shared = rows.div_ceil(MIN_TILES).min(MAX_TILE_ROWS);
    shared.max(MIN_TILE_VALUES / cols).min(rows).next_multiple_of(ROW_STEP)
}

const ROW_STEP: usize = 4;
const MAX_TILE_ROWS: usize = 32;
/// Least tiles of a matrix with enough rows: enough for the threads of one socket.
const MIN_TILES: usize = 24;
/// Least weights in a tile: 16 KiB of bf16.
const MIN_TILE_VALUES: usize = 8 << 10;
/// Most bytes of intermediate activations.
const MAX_H_BYTES: usize = 64 << 20;
/// Least rows in a round, for any size of rows.
const MIN_H_ROWS: usize = 64;

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::{ExpertGroup, ExpertWeights, Weight, WeightBytes, WeightFormat};

    #[test]
    fn tiles_are_neither_tiny_nor_long() {
        // Qwen3-30B-A3B, Mixtral 8x7B, DeepSeek-V3: gate and up, then down.
        assert_eq!([tile_rows(2048, 768), tile_rows(768, 2048)], [32, 32]);
        assert_eq!([tile_rows(4096, 14336), tile_rows(14336, 4096)], [32, 32]);
        assert_eq!([tile_rows(7168, 2048), tile_rows(2048, 7168)], [32, 32]);
        // A small model, and no sizes at all.
        assert_eq!([tile_rows(256, 128), tile_rows(128, 256)], [32, 64]);
        assert_eq!(tile_rows(1, 1), 4);
    }

    #[test]
    fn rounds_hold_every_entry_once_in_order_within_the_bound() {
        const INTER: usize = 1 << 18;
        let matrix = |rows, cols| {
            let bytes = WeightBytes::from(vec![0u8; INTER * 2]);
            Weight::new(WeightFormat::Bf16, rows, cols, bytes, None).unwrap()
        };
        let mut experts = LayerExperts::new(1, INTER).unwrap();
        for expert in [2, 5] {
            let (gate, up) = (Some(matrix(INTER, 1)), matrix(INTER, 1));
            let weights = ExpertWeights { gate, up, down: matrix(1, INTER), biases: None };
            experts.insert(expert, Arc::new(weights)).unwrap();
        }
        let groups = [
            ExpertGroup { expert: 2, begin: 0, end: 100 },
            ExpertGroup { expert: 3, begin: 100, end: 100 },
            ExpertGroup { expert: 5, begin: 110, end: 150 },
        ];
        let batch = LayerBatch {
            x: &[0.0],
            groups: &groups,
            entry_token: &[0; 150],
            entry_weight: &[1.0; 150],
        };
        batch.validate(&experts, 1).unwrap();
        let mut plan = Plan::default();
        for _ in 0..2 {
            plan.build(&experts, &batch);
            let cut: Vec<_> =
                plan.segments.iter().map(|s| (s.expert, s.begin, s.end, s.h_row)).collect();
            let expected = [(2, 0, 64, 0), (2, 64, 100, 0), (5, 110, 138, 36), (5, 138, 150, 0)];
            assert_eq!(cut, expected);
            assert_eq!(plan.max_h_rows, 64);
            let mut first_tile = 0;
            for phase in &plan.phases {
                assert_eq!(phase.first_tile, first_tile);
                first_tile += phase.num_tiles;
            }
            assert_eq!((first_tile, plan.phases.len()), (plan.num_tiles, 6));
            let segments: Vec<_> = plan
                .phases
                .iter()
                .filter(|phase| phase.kind == PhaseKind::GateUp)
                .map(|phase| (phase.first_segment, phase.num_segments))
                .collect();
            assert_eq!(segments, [(0, 1), (1, 2), (3, 1)]);
        }
    }
}
