// Numbers for soft GPUs: a boxed fallback replaces each CUDA kernel of torch's operators. It hands
// the memory of CUDA tensors, which is the host's (runtime.c), to the operator's CPU kernel, and
// puts new results into CUDA tensors. Operators that only CUDA has are written out at the end.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_foreach_copy_native.h>
#include <ATen/ops/copy_native.h>
#include <c10/cuda/CUDAStream.h>

#include <map>
#include <set>

extern "C" cudaError_t soft_gpu_operator(const char* name);  // in runtime.c: counts it, or fails

namespace {
using at::Tensor;
using c10::DispatchKey;
using c10::IValue;
using c10::OperatorHandle;
using torch::jit::Stack;
using Names = std::set<std::string>;

// Memory, metadata and choices: for these CUDA's own code launches no kernel.
const Names kNative{
    "aten::empty.memory_format", "aten::empty_strided", "aten::resize_", "aten::is_set_to",
    "aten::set_", "aten::set_.source_Storage", "aten::set_.source_Storage_storage_offset",
    "aten::set_.source_Tensor", "aten::record_stream", "aten::_local_scalar_dense",
    "aten::_use_cudnn_ctc_loss", "aten::_use_cudnn_ctc_loss.Tensor",
    "aten::_use_miopen_ctc_loss", "aten::_use_miopen_ctc_loss.Tensor"};
// These have no CUDA kernel of their own, but would go to cuDNN, or launch one.
const Names kComposite{"aten::convolution", "aten::copy_"};
// These wait for the device, for the size of their result or for a check.
const Names kWaits{
    "aten::nonzero", "aten::nonzero.out", "aten::masked_select", "aten::masked_select.out",
    "aten::equal", "aten::_unique", "aten::_unique2", "aten::unique_dim", "aten::bincount",
    "aten::unique_consecutive", "aten::unique_dim_consecutive", "aten::repeat_interleave.Tensor"};
// These take tensors of the CPU too, and copy them: masks become indices, so they wait.
const Names kIndex{"aten::index.Tensor", "aten::index.Tensor_out", "aten::_index_put_impl_"};
const Names kMixed{"aten::copy_", "aten::_ctc_loss", "aten::_ctc_loss.Tensor",
                   "aten::_ctc_loss_backward", "aten::_ctc_loss_backward.Tensor"};

// A value, or each of a list.
template <typename Function> void visit(const IValue& value, const Function& function) {
  if (value.isTensor() && value.toTensor().defined()) function(value.toTensor());
  if (value.isList()) for (const IValue& each : value.toListRef()) visit(each, function);
}
template <typename Function> IValue transform(const IValue& value, const Function& function) {
  if (value.isTensor()) return function(value.toTensor());
  if (!value.isList()) return value;
  auto list = value.toList().copy();
  for (size_t i = 0; i < list.size(); ++i) list.set(i, transform(list.get(i), function));
  return list;
}

class Call {
 public:
  Call(const OperatorHandle& op, const std::string& name, Stack& stack)
      : op_(op), name_(name), arguments_(op.schema().arguments()), stack_(stack),
        given_(stack.end() - arguments_.size(), stack.end()) {}

  void run() {
    find_device();
    c10::DeviceGuard guard(device_);
    C10_CUDA_CHECK(soft_gpu_operator(name_.c_str()));
    if (name_ == "aten::copy_" && given_[0].toTensor().is_cpu() != given_[1].toTensor().is_cpu())
      return copy_by_runtime();
    if (waits()) c10::cuda::stream_synchronize(c10::cuda::getCurrentCUDAStream());
    const size_t first = stack_.size() - arguments_.size();
    for (size_t i = 0; i < arguments_.size(); ++i)
      stack_[first + i] = on_cpu(given_[i], arguments_[i]);
    const std::string& last = arguments_.back().name();
    if (last == "half_to_float" && given_.back().toBool())  // softmax, with a type for its result
      stack_[first] = on_cpu(given_[0].toTensor().to(at::kFloat), false);
    {
      at::AutoDispatchBelowAutograd no_autograd;
      c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
      op_.redispatchBoxed(c10::DispatchKeySet(DispatchKey::CPU), &stack_);
    }
    for (auto& [out, stand_in] : outs_) out.resize_(stand_in.sizes()).copy_(stand_in, true);
    const auto& returns = op_.schema().returns();
    for (size_t i = 0; i < returns.size(); ++i) {
      IValue& result = stack_[stack_.size() - returns.size() + i];
      if (returns[i].alias_info()) result = argument_like(returns[i]);
      else result = transform(result, [&](const Tensor& tensor) { return on_cuda(tensor); });
    }
    if (last == "input_dtype")  // its gradient
      stack_.back() = stack_.back().toTensor().to(given_.back().toScalarType());
  }

 private:
  // All tensors must be on one device, but for numbers on the CPU.
  void find_device() {
    bool is_found = false;
    const auto use = [&](at::Device device) {
      if (!is_found && device.is_cuda()) device_ = device, is_found = true;
      TORCH_CHECK(device == device_ || !is_found || kIndex.count(name_) || kMixed.count(name_),
                  "Expected all tensors to be on the same device, but found at least two devices, ",
                  device_, " and ", device, "! (soft GPU, ", name_, ")");
    };
    for (const bool is_second : {false, true})  // which one is on CUDA must be known first
      for (const IValue& value : given_)
        visit(value, [&](const Tensor& tensor) {
          if (tensor.is_cuda() || (is_second && tensor.dim())) use(tensor.device());
        });
    for (const IValue& value : given_)
      if (value.isDevice() && value.toDevice().has_index()) use(value.toDevice());
    if (!is_found) device_ = at::Device(at::kCUDA, c10::cuda::current_device());
  }

  // Between the host and a device CUDA's own code is right. It comes back for what it converts.
  void copy_by_runtime() {
    Tensor to = given_[0].toTensor();
    at::native::copy_(to, given_[1].toTensor(), given_[2].toBool());
    stack_.resize(stack_.size() - arguments_.size());
    stack_.emplace_back(to);
  }

  bool waits() const {
    if (arguments_.back().name() == "output_size" && !given_.back().isNone()) return false;
    if (!kIndex.count(name_)) return kWaits.count(name_);
    int num_masks = 0, num_others = 0, num_on_cpu = 0;
    visit(given_[1], [&](const Tensor& index) {
      ++(index.dtype() == at::kBool || index.dtype() == at::kByte ? num_masks : num_others);
      num_on_cpu += index.is_cpu();
    });
    const bool fills = name_ == "aten::_index_put_impl_" && num_masks == 1 && !num_others &&
                       given_[2].toTensor().is_cpu() && given_[2].toTensor().numel() == 1;
    return num_on_cpu || (num_masks && !fills);  // masked_fill needs no indices
  }
  IValue on_cpu(const IValue& value, const c10::Argument& argument) {
    if (value.isDevice()) return c10::Device(at::kCPU);
    if (argument.name() == "pin_memory" || argument.name() == "half_to_float") return false;
    if (argument.name() == "input_dtype") return given_[0].toTensor().scalar_type();
    if (argument.name() == "generator") return seeded(value);
    return transform(value, [&](const Tensor& t) { return on_cpu(t, argument.is_out()); });
  }
  Tensor on_cpu(const Tensor& tensor, bool is_out) {
    if (!tensor.defined() || !tensor.is_cuda()) return tensor;
    TORCH_CHECK(!tensor.is_sparse(), "soft GPU: no numbers for ", name_, " of sparse tensors");
    const auto options = tensor.options().device(at::kCPU);
    Tensor same = tensor.numel()
                      ? at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options)
                      : at::empty_strided(tensor.sizes(), tensor.strides(), options);
    if (is_out && !tensor.numel()) outs_.emplace_back(tensor, same);
    same._set_conj(tensor.is_conj());
    same._set_neg(tensor.is_neg());
    return same;
  }

  // A generator of the CPU, by the seed and the offset of the device's.
  IValue seeded(const IValue& given) const {
    at::Generator own = given.isNone() ? at::globalContext().defaultGenerator(device_)
                                       : given.toGenerator();
    if (own.device().is_cpu()) return own;
    std::lock_guard<std::mutex> lock(own.mutex());
    const uint64_t offset = own.unsafeGetGeneratorImpl()->get_offset();
    own.unsafeGetGeneratorImpl()->set_offset(offset + 4);
    const uint64_t bits = own.current_seed() * 0x9e3779b97f4a7c15 + offset * 0xbf58476d1ce4e5b9;
    return at::detail::createCPUGenerator(bits >> 32);
  }
  Tensor on_cuda(const Tensor& tensor) {
    if (!tensor.defined() || tensor.is_cuda()) return tensor;
    Tensor made = at::empty_like(tensor, at::TensorOptions().device(device_).pinned_memory(false));
    on_cpu(made, false).copy_(tensor);
    return made;
  }
  IValue argument_like(const c10::Argument& result) const {
    size_t i = 0;
    while (!arguments_[i].alias_info() ||
           arguments_[i].alias_info()->beforeSets() != result.alias_info()->beforeSets())
      ++i;
    return given_[i];
  }

  const OperatorHandle& op_;
  const std::string& name_;
  const std::vector<c10::Argument>& arguments_;
  Stack& stack_;
  const std::vector<IValue> given_;
  at::Device device_{at::kCUDA, 0};
  std::vector<std::pair<Tensor, Tensor>> outs_;  // empty ones, as the CPU's kernel resizes others
};

// ---- operators that only CUDA has: from their arguments to their results ----
using Values = std::vector<IValue>;

Tensor tensor(const IValue& value) { return value.isNone() ? Tensor() : value.toTensor(); }
Tensor sum(const IValue& value, const IValue& more) {
  return tensor(more).defined() ? tensor(value) + tensor(more) : tensor(value);
}
std::optional<Tensor> maybe(const IValue& value) { return value.toOptional<Tensor>(); }
Values foreach_copy(const Values& a) {  // tensor by tensor, as CUDA does where one is on the host
  at::native::foreach_tensor_copy_list_kernel_slow_(a[0].toTensorVector(), a[1].toTensorVector(),
                                                    a[2].toBool());
  return {};
}
Values dropout(const Values& a) {  // input, p, train
  const double keep = a[2].isNone() || a[2].toBool() ? 1 - a[1].toDouble() : 1;
  const Tensor mask = at::empty_like(tensor(a[0]), at::kBool).bernoulli_(keep);
  return {tensor(a[0]) * mask * (keep == 0 ? 0. : 1 / keep), mask};
}
Values lstm_cell(const Values& a) {  // input gates, hidden gates, cell, input bias, hidden bias
  const auto gates = (sum(a[0], a[3]) + sum(a[1], a[4])).chunk(4, 1);
  const Tensor cell = gates[1].sigmoid() * tensor(a[2]) + gates[0].sigmoid() * gates[2].tanh();
  return {gates[3].sigmoid() * cell.tanh(), cell, at::empty_like(cell)};
}
Values gru_cell(const Values& a) {  // input gates, hidden gates, hidden, input bias, hidden bias
  const auto x = sum(a[0], a[3]).chunk(3, 1), h = sum(a[1], a[4]).chunk(3, 1);
  const Tensor next = (x[2] + (x[0] + h[0]).sigmoid() * h[2]).tanh(), hidden = tensor(a[2]);
  return {next + (x[1] + h[1]).sigmoid() * (hidden - next), at::empty_like(hidden)};
}

// Of SyncBatchNorm.
Values norm_stats(const Values& a) {  // input, eps
  const auto [mean, variance] =
      at::batch_norm_update_stats(tensor(a[0]).to(at::kFloat), {}, {}, 0);
  return {mean, (variance + a[1].toDouble()).rsqrt()};
}
Values norm_gather_stats(const Values& a) {
  // input, means, inverse deviations, running mean, running variance, momentum, eps, counts
  const Tensor means = tensor(a[1]), counts = tensor(a[7]).reshape({-1, 1}).to(means.dtype());
  const Tensor n = counts.sum(), mean = (means * counts).sum(0) / n;
  const double momentum = a[5].toDouble(), eps = a[6].toDouble();
  const Tensor squares = ((tensor(a[2]).pow(-2) - eps + (means - mean).pow(2)) * counts).sum(0);
  Tensor running_mean = tensor(a[3]), running_variance = tensor(a[4]);
  if (running_mean.defined()) running_mean.lerp_(mean.to(running_mean.dtype()), momentum);
  if (running_variance.defined())
    running_variance.lerp_((squares / (n - 1)).to(running_variance.dtype()), momentum);
  return {mean, (squares / n + eps).rsqrt()};
}
Values norm_apply(const Values& a) {  // input, weight, bias, mean, inverse deviation, eps
  const Tensor variance = tensor(a[4]).pow(-2) - a[5].toDouble();
  return {std::get<0>(at::native_batch_norm(tensor(a[0]), maybe(a[1]), maybe(a[2]), tensor(a[3]),
                                            variance, false, 0, a[5].toDouble()))};
}
Values norm_backward_reduce(const Values& a) {
  // gradient, input, mean, inverse deviation, weight, and which of input, weight, bias to return
  const auto [unused, of_weight, of_bias] = at::native_batch_norm_backward(
      tensor(a[0]).to(at::kFloat), tensor(a[1]).to(at::kFloat), {}, {}, {}, tensor(a[2]),
      tensor(a[3]), true, 0, {false, true, true});
  return {of_bias, of_weight / tensor(a[3]), a[6].toBool() ? of_weight : Tensor(),
          a[7].toBool() ? of_bias.clone() : Tensor()};
}
Values norm_backward_apply(const Values& a) {
  // gradient, input, mean, inverse deviation, weight, sum, product, counts
  const Tensor x = tensor(a[1]), n = tensor(a[7]).sum(), invstd = tensor(a[3]);
  std::vector<int64_t> shape(x.dim(), 1);
  shape[1] = -1;  // by channel
  const Tensor slope = (invstd.pow(2) * tensor(a[6]) / n).reshape(shape);
  const Tensor scale = tensor(a[4]).defined() ? invstd * tensor(a[4]) : invstd;
  const Tensor centred = x.to(at::kFloat) - tensor(a[2]).reshape(shape);
  const Tensor dy = tensor(a[0]).to(at::kFloat) - (tensor(a[5]) / n).reshape(shape);
  return {((dy - centred * slope) * scale.reshape(shape)).to(x.dtype())};
}

const std::map<std::string, Values (*)(const Values&)> kWritten{
    {"aten::_foreach_copy_", foreach_copy},
    {"aten::native_dropout", dropout},
    {"aten::_thnn_fused_lstm_cell", lstm_cell},
    {"aten::_thnn_fused_gru_cell", gru_cell},
    {"aten::_fused_rms_norm", nullptr},  // of other operators, as on the CPU
    {"aten::batch_norm_stats", norm_stats},
    {"aten::batch_norm_gather_stats_with_counts", norm_gather_stats},
    {"aten::batch_norm_elemt", norm_apply},
    {"aten::batch_norm_backward_reduce", norm_backward_reduce},
    {"aten::batch_norm_backward_elemt", norm_backward_apply}};
// Autograd differentiates what they are made of.
const Names kDifferentiated{"aten::_thnn_fused_lstm_cell", "aten::_thnn_fused_gru_cell",
                            "aten::_fused_rms_norm"};

void run(const OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  const std::string name = toString(op.operator_name());
  const auto written = kWritten.find(name);
  if (written == kWritten.end()) {
    TORCH_CHECK(op.hasComputedKernelForDispatchKey(DispatchKey::CPU), "soft GPU: no numbers for ",
                name, ", as the CPU has no kernel");
    return Call(op, name, *stack).run();
  }
  if (!written->second) return op.redispatchBoxed(c10::DispatchKeySet(DispatchKey::CPU), stack);
  const size_t first = stack->size() - op.schema().arguments().size();
  const Values results = written->second(Values(stack->begin() + first, stack->end()));
  stack->resize(first);
  stack->insert(stack->end(), results.begin(), results.end());
}

struct Quiet : c10::WarningHandler { void process(const c10::Warning&) override {} };

bool install() {
  static auto* kept = new std::vector<c10::RegistrationHandleRAII>;  // for ever
  auto& dispatcher = c10::Dispatcher::singleton();
  Quiet quiet;  // torch warns of each
  c10::WarningUtils::WarningHandlerGuard guard(&quiet);
  const auto replace = [&](const c10::OperatorName& name, DispatchKey key) {
    kept->push_back(dispatcher.registerImpl(
        name, key, c10::KernelFunction::makeFromBoxedFunction<&run>(), {}, nullptr, "soft GPU"));
  };
  auto names = dispatcher.getRegistrationsForDispatchKey(DispatchKey::CUDA);
  for (const std::string& name : kComposite) names.emplace_back(name, "");
  for (const auto& name : names) {
    const std::string text = toString(name);
    const auto op = dispatcher.findSchema(name);
    if (!op || text.rfind("aten::", 0) != 0 || kNative.count(text)) continue;
    bool is_view = false;  // CUDA's own code makes these
    for (const auto& result : op->schema().returns())
      is_view |= result.alias_info() && !result.alias_info()->isWrite();
    if (!is_view) replace(name, DispatchKey::CUDA);
    if (kDifferentiated.count(text)) replace(name, DispatchKey::AutogradCUDA);
  }
  at::globalContext().setUserEnabledCuDNN(false);  // nor other libraries that nothing replaces
  at::globalContext().setSDPUseFlash(false);
  at::globalContext().setSDPUseMemEfficient(false);
  at::globalContext().setSDPUseCuDNN(false);
  return true;
}
const bool kIsInstalled = install();  // as this library is loaded
}  // namespace

// Called by nccl.c: make `to` the result of one of NCCL's operators on it and `from` times `scale`.
// The first operand is only copied.
extern "C" void soft_gpu_reduce(void* to, void* from, int64_t count, int type, int op,
                                double scale, bool is_first) {
  static const at::ScalarType types[] = {at::kChar, at::kByte, at::kInt, at::kUInt32, at::kLong,
                                         at::kUInt64, at::kHalf, at::kFloat, at::kDouble,
                                         at::kBFloat16, at::kFloat8_e4m3fn, at::kFloat8_e5m2};
  at::AutoDispatchBelowAutograd no_autograd;
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  Tensor result = at::from_blob(to, {count}, types[type]);
  Tensor next = at::from_blob(from, {count}, types[type]);
  if (scale != 1) next = (next * scale).to(types[type]);
  if (is_first) result.copy_(next);
  else if (op == 1) result.mul_(next);
  else if (op == 2) at::maximum_out(result, result, next);
  else if (op == 3) at::minimum_out(result, result, next);
  else result.add_(next);
}
