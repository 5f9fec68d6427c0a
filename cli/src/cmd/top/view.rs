//! The picture of `top`. It needs no terminal, so that tests can look at it.

use std::collections::VecDeque;

use control_api::text::is_disruptive;
use control_api::{ClusterStatus, Health, MemberInfo, MemberState};
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Cell, Paragraph, Row, Sparkline, Table};

/// One look at the fleet.
#[derive(Debug)]
pub struct Snapshot {
    pub status: ClusterStatus,
    pub members: Vec<MemberInfo>,
}

/// Order of the servers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Order {
    /// By name.
    Name,
    /// Most tokens per second first.
    Load,
    /// Servers that need attention first.
    State,
}

impl Order {
    pub fn next(self) -> Self {
        match self {
            Self::Name => Self::Load,
            Self::Load => Self::State,
            Self::State => Self::Name,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Name => "name",
            Self::Load => "load",
            Self::State => "state",
        }
    }
}

/// Tokens per second of the whole fleet at the last looks.
#[derive(Debug, Default)]
pub struct History(VecDeque<u64>);

impl History {
    pub fn add(&mut self, snapshot: &Snapshot) {
        if self.0.len() == MAX_LOOKS {
            self.0.pop_front();
        }
        self.0.push_back(snapshot.members.iter().map(tokens_per_s).sum::<f64>() as u64);
    }
}

/// Everything on the screen.
#[derive(Debug)]
pub struct Screen<'a> {
    pub url: &'a str,
    pub snapshot: &'a Snapshot,
    pub history: &'a History,
    pub order: Order,
    /// First server in sight.
    pub offset: usize,
    /// The reason why the last look failed.
    pub failure: Option<&'a str>,
    /// False for a picture: it has all problems, and no keys.
    pub is_live: bool,
}

impl Screen<'_> {
    pub fn draw(&self, frame: &mut Frame<'_>) {
        let notes = self.notes();
        let [head, load, table, foot] = Layout::vertical([
            Constraint::Length(FIRST_LINES + notes.len() as u16),
            Constraint::Length(LOAD_LINES),
            Constraint::Min(1),
            Constraint::Length(u16::from(self.is_live)),
        ])
        .areas(frame.area());
        self.draw_head(frame, head, notes);
        self.draw_load(frame, load);
        self.draw_servers(frame, table);
        let keys = Style::new().add_modifier(Modifier::DIM);
        let text = format!("q quit · o order ({}) · ↑ ↓ scroll", self.order.name());
        frame.render_widget(Paragraph::new(text).style(keys), foot);
    }

    /// Lines of a picture with all problems and servers.
    pub fn num_lines(&self) -> u16 {
        let num_rows = self.notes().len() + self.snapshot.members.len();
        u16::try_from(num_rows).unwrap_or(u16::MAX).saturating_add(FIRST_LINES + LOAD_LINES + 1)
    }

    /// The problems, a line each. A terminal has room for a few: the last line then counts the others.
    fn notes(&self) -> Vec<Line<'static>> {
        if let Some(failure) = self.failure {
            return vec![Line::styled(format!("no answer: {}", printable(failure)), Color::Red)];
        }
        let (_, problems) = self.snapshot.status.health();
        let most = if self.is_live { MAX_LIVE_PROBLEMS } else { usize::MAX };
        let num_shown = if problems.len() > most { most - 1 } else { problems.len() };
        let shown = problems[..num_shown].iter().map(|problem| printable(problem));
        let mut notes: Vec<_> = shown.map(|text| Line::styled(text, Color::Yellow)).collect();
        match problems.len() - num_shown {
            0 if notes.is_empty() => notes.push(Line::raw("everything is as planned")),
            0 => {}
            num_more => {
                let text = format!("and {num_more} more: see `switchyard status`");
                notes.push(Line::styled(text, Color::Yellow));
            }
        }
        notes
    }

    fn draw_head(&self, frame: &mut Frame<'_>, area: Rect, notes: Vec<Line<'static>>) {
        let status = &self.snapshot.status;
        let (health, _) = status.health();
        let colour = match health {
            Health::Healthy => Color::Green,
            Health::Degraded => Color::Yellow,
            Health::Down => Color::Red,
        };
        let word =
            Span::styled(health.as_str(), Style::new().fg(colour).add_modifier(Modifier::BOLD));
        let model = status.model.as_ref().map_or("no model".to_owned(), |model| {
            format!(
                "{}, {} layers of {} experts",
                model.architecture,
                model.moe_layers.len(),
                model.num_experts
            )
        });
        let first = Line::from(vec![
            word,
            Span::raw(format!("  {}  epoch {}  {}", self.url, status.epoch, printable(&model))),
        ]);
        let counts = &status.members;
        let second = format!(
            "{} serving, {} loading, {} draining, {} expired; {} watches; replicas {}",
            counts.serving,
            counts.loading,
            counts.draining,
            counts.expired,
            status.num_watchers,
            status.replicas
        );
        let lines: Vec<_> = [first, Line::raw(second)].into_iter().chain(notes).collect();
        frame.render_widget(Paragraph::new(lines), area);
    }

    fn draw_load(&self, frame: &mut Frame<'_>, area: Rect) {
        let [text, line] =
            Layout::horizontal([Constraint::Length(28), Constraint::Min(1)]).areas(area);
        let last = self.history.0.back().copied().unwrap_or(0);
        frame.render_widget(Paragraph::new(format!("{last} tokens/s")), text);
        // The newest looks, as many as there are columns.
        let hidden = self.history.0.len().saturating_sub(line.width.into());
        let shown = self.history.0.iter().skip(hidden).copied();
        let bars = Sparkline::default().data(shown).style(Style::new().fg(Color::Cyan));
        frame.render_widget(bars, line);
    }

    fn draw_servers(&self, frame: &mut Frame<'_>, area: Rect) {
        let mut members: Vec<&MemberInfo> = self.snapshot.members.iter().collect();
        match self.order {
            Order::Name => members.sort_by(|a, b| a.name.cmp(&b.name)),
            Order::Load => members.sort_by(|a, b| tokens_per_s(b).total_cmp(&tokens_per_s(a))),
            Order::State => members.sort_by_key(|member| is_well(member)),
        }
        let rows = members.into_iter().skip(self.offset).map(row);
        let widths = [
            Constraint::Min(16),
            Constraint::Length(10),
            Constraint::Length(22),
            Constraint::Length(8),
            Constraint::Length(9),
            Constraint::Length(11),
            Constraint::Length(8),
            Constraint::Length(8),
            Constraint::Min(10),
        ];
        let titles = [
            "SERVER", "STATE", "ADDRESS", "DEVICE", "EXPERTS", "TOKENS/S", "COMPUTE", "LEASE",
            "CLIENTS",
        ];
        let head = Row::new(titles).style(Style::new().add_modifier(Modifier::BOLD));
        frame.render_widget(Table::new(rows, widths).header(head), area);
    }
}

fn row(member: &MemberInfo) -> Row<'static> {
    let state = if member.suspected { "suspected" } else { member.state.as_str() };
    let colour = match member.state {
        MemberState::Expired => Color::Red,
        _ if is_well(member) => Color::Green,
        _ => Color::Yellow,
    };
    let load = member.load.as_ref();
    let links = load.map_or(0, |load| load.links.iter().map(|link| link.num_links).sum());
    let transports: Vec<_> = load
        .into_iter()
        .flat_map(|load| &load.links)
        .map(|link| printable(&link.transport))
        .collect();
    let experts = if member.experts_held == member.experts_assigned {
        member.experts_held.to_string()
    } else {
        format!("{}/{}", member.experts_held, member.experts_assigned)
    };
    let share = load
        .filter(|load| load.window_ms > 0)
        .map_or(0.0, |load| 100.0 * load.busy_ms as f64 / load.window_ms as f64);
    Row::new([
        Cell::new(printable(&member.name)),
        Cell::new(state.to_owned()).style(Style::new().fg(colour)),
        Cell::new(printable(&member.data_addr)),
        Cell::new(printable(load.and_then(|load| load.device.as_deref()).unwrap_or("cpu"))),
        Cell::new(experts),
        Cell::new(format!("{:.0}", tokens_per_s(member))),
        Cell::new(format!("{share:.0} %")),
        Cell::new(format!("{:.1} s", member.lease_remaining_ms as f64 / 1e3)),
        Cell::new(format!("{links} {}", transports.join(" "))),
    ])
}

fn is_well(member: &MemberInfo) -> bool {
    member.state == MemberState::Serving
        && !member.suspected
        && member.unreachable.is_none()
        && member.experts_held >= member.experts_assigned
}

fn tokens_per_s(member: &MemberInfo) -> f64 {
    let load = member.load.as_ref().filter(|load| load.window_ms > 0);
    load.map_or(0.0, |load| load.num_tokens as f64 * 1e3 / load.window_ms as f64)
}

/// `text` of a peer without characters that a terminal would execute.
fn printable(text: &str) -> String {
    text.chars().map(|c| if is_disruptive(c) { '\u{fffd}' } else { c }).collect()
}

/// Lines before those of problems, and lines of the load.
const FIRST_LINES: u16 = 2;
const LOAD_LINES: u16 = 2;
/// Lines of a terminal for problems.
const MAX_LIVE_PROBLEMS: usize = 4;
const MAX_LOOKS: usize = 600;

#[cfg(test)]
mod tests {
    use control_api::{LoadReport, MemberCounts, MemberId, StoreStatus, TransportLinks};

    use super::*;

    fn member(name: &str, state: MemberState, num_tokens: u64) -> MemberInfo {
        let load = LoadReport {
            window_ms: 500,
            busy_ms: 125,
            num_tokens,
            links: vec![TransportLinks {
                transport: "shm\x1b[2J".to_owned(),
                num_links: 3,
                left_out: Vec::new(),
            }],
            ..LoadReport::default()
        };
        serde_json::from_value(serde_json::json!({
            "member_id": MemberId::random(), "name": name, "incarnation": 1, "data_addr": "10.0.0.1:7171",
            "state": state, "lease_remaining_ms": 2500, "experts_held": 8, "experts_assigned": 8, "load": load
        }))
        .unwrap()
    }

    fn snapshot() -> Snapshot {
        let status: ClusterStatus = serde_json::from_value(serde_json::json!({
            "cluster_id": "c", "version": "0", "uptime_ms": 1, "epoch": 42, "model": null, "num_servers": 3,
            "replicas": 2, "lease_ttl_ms": 3000, "members": MemberCounts::default(), "experts_total": 0,
            "experts_without_replica": 0, "experts_under_replicated": 0, "num_watchers": 5,
            "store": StoreStatus { kind: "memory".to_owned(), writable: true, error: None }
        }))
        .unwrap();
        let members = vec![
            member("quiet", MemberState::Serving, 10),
            member("gone", MemberState::Expired, 0),
            member("busy", MemberState::Serving, 700),
        ];
        Snapshot { status, members }
    }

    fn picture(order: Order) -> String {
        let (snapshot, mut history) = (snapshot(), History::default());
        history.add(&snapshot);
        super::super::picture("http://127.0.0.1:7070", &snapshot, &history, order).unwrap()
    }

    #[test]
    fn a_picture_has_every_server_in_order_and_nothing_a_terminal_would_execute() {
        let places = |text: &str| ["busy", "gone", "quiet"].map(|name| text.find(name).unwrap());
        let by_name = picture(Order::Name);
        assert!(places(&by_name).is_sorted(), "{by_name}");
        for expected in [
            "down",
            "epoch 42",
            "no expert server has registered",
            "1420 tokens/s",
            "25 %",
            "expired",
        ] {
            assert!(by_name.contains(expected), "{expected}: {by_name}");
        }
        assert!(!by_name.contains('\x1b'), "{by_name:?}");
        let [busy, gone, quiet] = places(&picture(Order::Load));
        assert!(busy < quiet && quiet < gone);
        let [busy, gone, quiet] = places(&picture(Order::State));
        assert!(gone < busy && gone < quiet);
    }

    #[test]
    fn a_picture_has_every_problem_and_a_terminal_says_how_many_more() {
        let (mut snapshot, history) = (snapshot(), History::default());
        snapshot.status.problems = (0..9).map(|nth| format!("trouble {nth}")).collect();
        let num_problems = snapshot.status.health().1.len();
        let text = super::super::picture("url", &snapshot, &history, Order::Name).unwrap();
        for nth in 0..9 {
            assert!(text.contains(&format!("trouble {nth}")), "{text}");
        }
        assert!(text.contains("quiet") && !text.contains("quit"), "{text}");
        let (order, url) = (Order::Name, "url");
        let screen = Screen {
            url,
            snapshot: &snapshot,
            history: &history,
            order,
            offset: 0,
            failure: None,
            is_live: true,
        };
        let notes: Vec<String> = screen.notes().iter().map(ToString::to_string).collect();
        assert_eq!(notes.len(), MAX_LIVE_PROBLEMS);
        assert!(notes[3].contains(&format!("and {} more", num_problems - 3)), "{notes:?}");
    }

    #[test]
    fn the_history_is_bounded() {
        let mut history = History::default();
        let snapshot = snapshot();
        (0..MAX_LOOKS + 10).for_each(|_| history.add(&snapshot));
        assert_eq!(history.0.len(), MAX_LOOKS);
    }
}
