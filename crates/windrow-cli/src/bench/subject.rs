//! A plan of any operator on random tensors, as it is measured.

use super::{Case, Description, Entry, Selection, Work};
use windrow::internal::{Configuration, Measured, Operator, PlanInputs};
use windrow::verify::{Comparison, random_tensor};
use windrow::{DType, Placed, Plan, PlanOptions, Workspace, cpu};

type Algorithm<O> = <<O as Operator>::Configuration as Configuration>::Algorithm;

/// The operator and case to measure.
pub(super) struct About<O: Operator> {
    pub(super) spec: O::Spec,
    /// The case's algorithm; the cost model's choice if there is none.
    pub(super) algorithm: Option<Algorithm<O>>,
    pub(super) name: String,
    pub(super) dtype: DType,
    pub(super) shape: String,
    pub(super) work: Work,
    /// Rows or channels that are compared with the oracle at each end.
    pub(super) sampled: usize,
    pub(super) direct: Direct<O>,
}

/// The program with which the speed-up compares.
pub(super) enum Direct<O: Operator> {
    /// The direct algorithm, packing included.
    Algorithm(Algorithm<O>),
    /// The simplest program, for so many threads.
    Loop(fn(&O::Spec, usize) -> windrow::Result<Plain>),
}

/// The simplest program, on tensors of its own.
pub(super) type Plain = Box<dyn FnMut()>;

struct Subject<O: Measured> {
    description: Description,
    threads: usize,
    sampled: usize,
    plan: Plan<O>,
    direct: Reference<O>,
    inputs: Vec<Option<Placed>>,
    kept: O::SearchData,
    y: Placed,
    copied: Option<Placed>,
    workspace: Workspace,
}

enum Reference<O: Operator> {
    Plan(Box<Plan<O>>, Placed),
    Loop(Plain),
}

/// The cases that the algorithm asked for can compute.
pub(super) fn entries<O: Measured>(
    s: &Selection<'_>,
    cases: impl IntoIterator<Item = windrow::Result<About<O>>>,
) -> windrow::Result<Vec<Entry>> {
    let named = match s.algorithm.map(str::parse::<Algorithm<O>>) {
        Some(Err(_)) => return Ok(Vec::new()),
        named => named.and_then(Result::ok),
    };
    let mut entries: Vec<Entry> = Vec::new();
    for about in cases {
        let mut about = about?;
        if named.is_some() && about.algorithm.is_some() {
            continue; // the same shape is there without an algorithm of its own
        }
        about.algorithm = named.or(about.algorithm);
        let options = s.options;
        let can = Plan::<O>::algorithms(&about.spec, options.device);
        if about.algorithm.is_none_or(|a| can.contains(&a)) {
            entries.push(Box::new(move || Ok(Box::new(Subject::new(&about, options)?))));
        }
    }
    Ok(entries)
}

impl<O: Measured> Subject<O> {
    fn new(about: &About<O>, options: PlanOptions) -> windrow::Result<Self> {
        let (spec, device) = (&about.spec, options.device);
        let plan = match about.algorithm {
            Some(algorithm) => Plan::with_algorithm(spec, algorithm, &options)?,
            None => Plan::new(spec, &options)?,
        };
        let output = || Placed::output(*O::y(spec), device);
        let threads = options.threads.map_or_else(cpu::num_threads, usize::from);
        let (direct, called) = match about.direct {
            Direct::Algorithm(algorithm) => {
                let direct = Plan::with_algorithm(spec, algorithm, &options)?;
                (Reference::Plan(Box::new(direct), output()?), "the direct algorithm")
            }
            Direct::Loop(make) => (Reference::Loop(make(spec, threads)?), "a scalar loop"),
        };
        let direct_bytes = match &direct {
            Reference::Plan(plan, _) => plan.workspace_bytes(),
            Reference::Loop(_) => 0,
        };
        let mut workspace = Workspace::for_sizes(device, [plan.workspace_bytes(), direct_bytes])?;
        let inputs = (1..).zip(O::INPUTS).map(|(seed, input)| {
            let Some(desc) = (input.desc)(spec) else { return Ok(None) };
            let (low, high) = O::range(input.name);
            Placed::new(random_tensor(seed, *desc, low, high)?, device).map(Some)
        });
        let inputs = inputs.collect::<windrow::Result<Vec<_>>>()?;
        let mut kept = O::SearchData::default();
        O::prepare(&PlanInputs::new(&plan, &inputs), &mut kept, &mut workspace)?;
        let copied = matches!(about.work, Work::Bytes(_)).then(output).transpose()?;
        let description = Description {
            op: O::NAME,
            name: about.name.clone(),
            device,
            dtype: about.dtype,
            algorithm: plan.algorithm().to_string(),
            configuration: plan.configuration().to_string(),
            shape: about.shape.clone(),
            plan: plan.explain(),
            work: about.work,
            direct: called,
        };
        let (y, sampled) = (output()?, about.sampled);
        Ok(Subject {
            description,
            threads,
            sampled,
            plan,
            direct,
            inputs,
            kept,
            y,
            copied,
            workspace,
        })
    }
}

impl<O: Measured> Case for Subject<O> {
    fn describe(&self) -> Description {
        self.description.clone()
    }

    fn run(&mut self) -> windrow::Result<()> {
        let run = PlanInputs::new(&self.plan, &self.inputs);
        O::run(&run, &self.kept, self.y.as_mut()?, &mut self.workspace)?;
        self.workspace.synchronize()
    }

    fn run_direct(&mut self) -> windrow::Result<()> {
        match &mut self.direct {
            Reference::Loop(run) => run(),
            Reference::Plan(plan, y) => {
                let run = PlanInputs::new(plan, &self.inputs);
                let nothing = O::SearchData::default();
                O::run(&run, &nothing, y.as_mut()?, &mut self.workspace)?;
                self.workspace.synchronize()?;
            }
        }
        Ok(())
    }

    fn copy(&mut self) -> windrow::Result<()> {
        if let (Some(to), Some(Some(x))) = (&mut self.copied, self.inputs.first()) {
            to.copy_from(x, self.threads, &self.workspace)?;
        }
        self.workspace.synchronize()
    }

    fn compare(&mut self) -> windrow::Result<Comparison> {
        let args = PlanInputs::new(&self.plan, &self.inputs).args();
        self.plan.compare_ends(&args, &self.y.as_ref(), self.sampled)
    }

    fn elements(&self) -> usize {
        self.y.desc().layout.len()
    }
}
