//! Experts that a control plane assigns to a server on a GPU while clients are served. This control plane
//! assigns what the test wants; the product's control plane does not change the assignment of a member.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use axum::extract::{Path, State};
use axum::routing::{delete, post, put};
use axum::{Json, Router};
use control_api::{
    Assignment, LayerAssignment, LeaseRequest, LeaseResponse, MemberId, MemberInfo, MemberState,
    ReadyRequest, RegisterRequest, RegisterResponse, WantedDigests,
};
use protocol::WireDtype;
use switchyard_expert_server::{ExpertSelection, Placement, TicketMode};

use crate::common::{PATIENCE, Reference, Request, eventually, metric, seeded};
use crate::device::client::Outcome;
use crate::device::{check, devices, join, server_on};

const DTYPE: WireDtype = WireDtype::Bf16;

/// The wishes of the control plane, and the reports that it received.
#[derive(Default)]
struct Book {
    assignment: Assignment,
    version: u64,
    member: Option<RegisterRequest>,
    held: Assignment,
    /// From the last report of the member.
    device: Option<String>,
}

type Shared = Arc<Mutex<Book>>;

fn open(book: &Shared) -> std::sync::MutexGuard<'_, Book> {
    book.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Book {
    fn info(&self) -> MemberInfo {
        let member = self.member.as_ref().expect("registered");
        MemberInfo {
            member_id: id(),
            name: member.name.clone(),
            incarnation: member.incarnation,
            data_addr: member.data_addr.clone(),
            metrics_addr: None,
            weights_addr: None,
            state: MemberState::Serving,
            keeps_serving: false,
            suspected: false,
            lease_remaining_ms: LEASE_MS,
            experts_held: self.held.num_experts() as u64,
            experts_assigned: self.assignment.num_experts() as u64,
            load: None,
            unreachable: None,
            not_stored: None,
            insecure: None,
            fingerprint: None,
            reports: Vec::new(),
        }
    }
}

fn id() -> MemberId {
    MemberId::parse("m-1").expect("an identity")
}

async fn register(
    State(book): State<Shared>,
    Json(request): Json<RegisterRequest>,
) -> Json<RegisterResponse> {
    let mut book = open(&book);
    book.member = Some(request);
    Json(RegisterResponse {
        member_id: id(),
        lease_ttl_ms: LEASE_MS,
        epoch: 1,
        assignment: book.assignment.clone(),
        assignment_version: book.version,
        ticket_keys: None,
    })
}

async fn renew(
    State(book): State<Shared>,
    Path(_): Path<String>,
    Json(request): Json<LeaseRequest>,
) -> Json<LeaseResponse> {
    let mut book = open(&book);
    if let Some(load) = request.load {
        book.device = load.device;
    }
    Json(LeaseResponse {
        lease_ttl_ms: LEASE_MS,
        epoch: 1,
        state: MemberState::Serving,
        assignment_version: book.version,
        assignment: (request.assignment_version != book.version).then(|| book.assignment.clone()),
        wanted_digests: WantedDigests::None,
        keeps_serving: false,
        ticket_keys: None,
    })
}

async fn ready(
    State(book): State<Shared>,
    Path(_): Path<String>,
    Json(request): Json<ReadyRequest>,
) -> Json<MemberInfo> {
    let mut book = open(&book);
    book.held = request.holds;
    Json(book.info())
}

fn of(experts: &BTreeMap<u32, Vec<u32>>) -> Assignment {
    let layers = experts.iter();
    Assignment {
        layers: layers
            .map(|(layer, experts)| LayerAssignment { layer: *layer, experts: experts.clone() })
            .collect(),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn experts_that_are_assigned_later_are_loaded_onto_the_gpu_while_clients_are_served() {
    let Some((device, gpu)) = devices() else { return };
    let mut rng = seeded();
    let reference = Reference::open();
    let shape = reference.shape;
    let (half, all) = (shape.num_experts / 2, shape.num_experts);
    let mut wanted: BTreeMap<u32, Vec<u32>> =
        (0..shape.num_layers).map(|layer| (layer, (0..half).collect())).collect();
    let book: Shared = Arc::default();
    (open(&book).assignment, open(&book).version) = (of(&wanted), 1);
    let app = Router::new()
        .route("/v1/members", post(register))
        .route("/v1/members/{id}/lease", put(renew))
        .route("/v1/members/{id}/ready", post(ready))
        .route("/v1/members/{id}", delete(async || Json(())))
        .with_state(Arc::clone(&book));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let url = format!("http://{}", listener.local_addr().expect("its address"));
    let control = tokio::spawn(async move { axum::serve(listener, app).await });

    let server = server_on(device, DTYPE, ExpertSelection::All, |config| {
        config.placement = Placement::ControlPlane { url, token: None };
        // The stub has no keys for them.
        config.tickets = TicketMode::Off;
    })
    .await;
    server.serving(PATIENCE).await.expect("it serves");
    assert_eq!(server.holds(), of(&wanted), "what is assigned, not what the configuration says");
    let mut client = join(&gpu, &server, shape, 1, DTYPE).await;
    let mut layer = |layer: u32, experts: &[u32]| {
        let mut request = Request::random(&mut rng, &shape, experts.len());
        request.layer = layer;
        for (routes, expert) in request.routes.iter_mut().zip(experts) {
            *routes = vec![(*expert, 0.5)];
        }
        let (outcome, rows) = tokio::task::block_in_place(|| client.layer(&request));
        if outcome == Outcome::Answered {
            check(&reference, &request, DTYPE, &rows);
        }
        outcome
    };
    assert_ne!(layer(0, &[all - 1]), Outcome::Answered);
    // Two steps, so that the second finds layers of different sizes.
    for step in 0..2u32 {
        for (layer, experts) in &mut wanted {
            match (step, layer % 2) {
                (0, 0) => experts.push(half),
                (0, _) => {}
                _ => *experts = (0..all).collect(),
            }
        }
        {
            let mut book = open(&book);
            (book.assignment, book.version) = (of(&wanted), book.version + 1);
        }
        let mut num_calls = 0;
        let deadline = std::time::Instant::now() + PATIENCE;
        while server.holds() != of(&wanted) {
            assert!(std::time::Instant::now() < deadline, "not in time: step {step}");
            let experts: Vec<u32> = (0..half).collect();
            assert_eq!(layer(num_calls % shape.num_layers, &experts), Outcome::Answered);
            num_calls += 1;
        }
        for (idx, experts) in &wanted {
            assert_eq!(layer(*idx, experts), Outcome::Answered, "step {step}");
        }
    }
    eventually("the control plane has the report", || open(&book).held == of(&wanted));
    eventually("it knows the device", || open(&book).device == Some(device.to_string()));
    let loaded = metric(server.metrics(), "switchyard_server_experts_loaded");
    assert_eq!(loaded, f64::from(shape.num_layers * all));
    let phase = |name: &str| {
        let name = format!("switchyard_server_phase_seconds_count{{phase=\"{name}\"}}");
        metric(server.metrics(), &name)
    };
    eventually("every batch has its phases", || {
        phase("compute") > 0.0
            && phase("gather") == phase("compute")
            && phase("queue") == phase("compute")
    });
    server.shutdown().await;
    control.abort();
}

const LEASE_MS: u64 = 600;
